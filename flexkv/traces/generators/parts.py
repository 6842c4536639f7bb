"""What generators share: `parameter` (a documented field) - `checked` - `Writer` (requests -> a
Trace).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

from flexkv.errors import InputError
from flexkv.traces.chaining import Chainer, Prompt
from flexkv.traces.model import Trace, TraceBuilder

ANSWER_TOKENS_PER_S = 50.0  # how fast answers are taken to come
_T = TypeVar("_T")


def parameter(default: _T, help: str) -> _T:
    """Declare a field of a generator, with its default and what it means."""
    field: Any = dataclasses.field(default=default, metadata={"help": help})
    chosen: _T = field
    return chosen


def checked(generator: Any) -> None:
    """Make sure that numbers are what their names say.

    Raises:
        InputError: a share is not in [0, 1], or another number is not above 0.
    """
    for field in dataclasses.fields(generator):
        value = getattr(generator, field.name)
        if field.name.endswith("_share"):
            if not 0 <= value <= 1:
                raise InputError(f"{field.name} is a share from 0 to 1, got {value}")
        elif not 0 < value < math.inf:
            raise InputError(f"{field.name} is above 0, got {value}")


class Writer:
    """Collects the requests of a generator."""

    def __init__(self, kind: str, tokens_per_block: int) -> None:
        self._kind, self._size, self._chainer = kind, tokens_per_block, Chainer()
        self._builder = TraceBuilder(kind)

    def __len__(self) -> int:
        return len(self._builder)

    def prompt(self) -> Prompt:
        """Begin a prompt."""
        return Prompt(self._chainer, self._size)

    def request(self, time_s: float, session: str, prompt: Prompt, answer_tokens: int) -> None:
        """Ask for an answer to a prompt; times are kept to the millisecond."""
        self._builder.add(0, round(time_s * 1e3), session, prompt.tokens, answer_tokens, prompt.ids)

    def trace(self, seed: int) -> Trace:
        """Return what was collected."""
        return self._builder.build(f"{self._kind}-{seed}", self._size)
