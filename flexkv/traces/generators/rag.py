"""Questions over retrieved documents: `Rag`."""

from __future__ import annotations

from dataclasses import dataclass

from flexkv.errors import InputError
from flexkv.traces.draws import Draws, zipf
from flexkv.traces.generators.parts import Writer, checked, parameter
from flexkv.traces.model import Trace


@dataclass(frozen=True, slots=True)
class Rag:
    """Independent questions: a system prompt, some documents of Zipf popularity, the question.

    Documents stand in the order of their popularity, which repeats prefixes, or in any order.
    """

    tokens_per_block: int = parameter(16, "tokens of one block")
    requests_per_s: float = parameter(2.0, "questions of a second")
    documents: int = parameter(1000, "documents in all")
    popularity: float = parameter(1.0, "exponent of the documents' Zipf popularity")
    retrieved: int = parameter(4, "documents of a question")
    shuffled_share: float = parameter(0.5, "share of the questions with documents in any order")
    system_tokens: int = parameter(400, "tokens of the system prompt")
    document_tokens: int = parameter(600, "median tokens of a document")
    question_tokens: int = parameter(40, "median tokens of a question")
    answer_tokens: int = parameter(200, "median tokens of an answer")

    def __post_init__(self) -> None:
        checked(self)
        if self.retrieved > self.documents:
            raise InputError(f"{self.retrieved} retrieved of {self.documents} documents cannot be")

    def __call__(self, requests: int, seed: int) -> Trace:
        """Make so many requests."""
        draws, writer = Draws(seed), Writer("rag", self.tokens_per_block)
        popularity = zipf(self.documents, self.popularity)
        lengths = [draws.length(self.document_tokens) for _ in popularity]
        time_s = 0.0
        for number in range(requests):
            time_s += draws.exponential(1 / self.requests_per_s)
            chosen: set[int] = set()
            while len(chosen) < self.retrieved:
                document = draws.pick(popularity)
                while document in chosen:  # the next one that is not there yet
                    document = (document + 1) % self.documents
                chosen.add(document)
            order = sorted(chosen)
            if draws.chance(self.shuffled_share):
                order = draws.shuffled(order)
            prompt = writer.prompt()
            prompt.add("system", self.system_tokens)
            for document in order:
                prompt.add(("document", document), lengths[document])
            prompt.add(("question", number), draws.length(self.question_tokens))
            writer.request(time_s, f"rag-{number}", prompt, draws.length(self.answer_tokens))
        return writer.trace(seed)
