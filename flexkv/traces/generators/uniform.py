"""Prefixes that are all equally popular: `Uniform`."""

from __future__ import annotations

from dataclasses import dataclass

from flexkv.traces.draws import Draws
from flexkv.traces.generators.parts import Writer, checked, parameter
from flexkv.traces.model import Trace


@dataclass(frozen=True, slots=True)
class Uniform:
    """A shared prefix, each equally often, then tokens of the request's own: the hardest case for
    any policy, as nothing tells prefixes apart.
    """

    tokens_per_block: int = parameter(16, "tokens of one block")
    requests_per_s: float = parameter(2.0, "requests of a second")
    prefixes: int = parameter(100, "shared prefixes")
    prefix_tokens: int = parameter(1024, "tokens of a shared prefix")
    own_tokens: int = parameter(256, "median tokens that a request shares with no other")
    answer_tokens: int = parameter(200, "median tokens of an answer")

    def __post_init__(self) -> None:
        checked(self)

    def __call__(self, requests: int, seed: int) -> Trace:
        """Make so many requests."""
        draws, writer, time_s = Draws(seed), Writer("uniform", self.tokens_per_block), 0.0
        for number in range(requests):
            time_s += draws.exponential(1 / self.requests_per_s)
            prompt = writer.prompt()
            prompt.add(("prefix", draws.integer(0, self.prefixes - 1)), self.prefix_tokens)
            prompt.add(("own", number), draws.length(self.own_tokens))
            writer.request(time_s, f"uniform-{number}", prompt, draws.length(self.answer_tokens))
        return writer.trace(seed)
