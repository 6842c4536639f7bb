"""Conversations: `Chat`."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from flexkv.traces.chaining import Prompt
from flexkv.traces.draws import Draws, zipf
from flexkv.traces.generators.parts import ANSWER_TOKENS_PER_S, Writer, checked, parameter
from flexkv.traces.model import Trace

_POPULARITY = 1.1  # of system prompts
_THINK_SIGMA = 1.0


@dataclass(frozen=True, slots=True)
class Chat:
    """Sessions that begin as a Poisson process; every turn holds all that was said before.

    Lengths are log-normal around their medians, think times too; turns are geometric.
    """

    tokens_per_block: int = parameter(16, "tokens of one block")
    sessions_per_s: float = parameter(1.0, "sessions that begin in a second")
    turns: float = parameter(5.0, "questions of a session, on average")
    think_s: float = parameter(60.0, "median seconds from an answer to the next question")
    system_prompts: int = parameter(8, "system prompts, of Zipf popularity")
    system_tokens: int = parameter(1200, "median tokens of a system prompt")
    question_tokens: int = parameter(80, "median tokens of a question")
    answer_tokens: int = parameter(250, "median tokens of an answer")

    def __post_init__(self) -> None:
        checked(self)

    def __call__(self, requests: int, seed: int) -> Trace:
        """Make so many requests."""
        draws, writer = Draws(seed), Writer("chat", self.tokens_per_block)
        popularity = zipf(self.system_prompts, _POPULARITY)
        system = [draws.length(self.system_tokens) for _ in popularity]
        waiting: list[tuple[float, int, Prompt]] = []  # (when, session, what was said)
        begins_s, sessions = draws.exponential(1 / self.sessions_per_s), 0
        while len(writer) < requests:
            if not waiting or begins_s <= waiting[0][0]:
                which, prompt = draws.pick(popularity), writer.prompt()
                prompt.add(("system", which), system[which])
                heapq.heappush(waiting, (begins_s, sessions, prompt))
                begins_s += draws.exponential(1 / self.sessions_per_s)
                sessions += 1
                continue
            time_s, session, prompt = heapq.heappop(waiting)
            prompt.add(("question", len(writer)), draws.length(self.question_tokens))
            answer = draws.length(self.answer_tokens)
            writer.request(time_s, f"chat-{session}", prompt, answer)
            prompt.add(("answer", len(writer)), answer)
            if not draws.chance(1 / self.turns):
                think_s = draws.lognormal(self.think_s, _THINK_SIGMA)
                next_s = time_s + answer / ANSWER_TOKENS_PER_S + think_s
                heapq.heappush(waiting, (next_s, session, prompt))
        return writer.trace(seed)
