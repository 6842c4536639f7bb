"""What a heartbeat brings back: `Beat`; `scores_of`, `number_of` read it from the server's answers.

A member's score counts its heartbeats, above the number of its generation: whoever sees it change
knows that the node lives, by no clock but its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GENERATION = 1 << 32  # of a score: generation * 2**32 + heartbeats, exact in a double


@dataclass(frozen=True, slots=True)
class Beat:
    """What a heartbeat brings back: the cluster's epoch, all members with their scores, and whether
    this node is to drain.
    """

    epoch: int
    members: dict[str, int]
    drain: bool


def number_of(text: Any) -> int:
    """A number from the server's answer, 0 where there is none."""
    return int(float(text)) if text is not None else 0


def scores_of(answer: Any) -> dict[str, int]:
    """Members and their scores, from pairs or from one flat list."""
    if answer and not isinstance(answer[0], list | tuple):
        answer = list(zip(answer[::2], answer[1::2], strict=True))
    return {bytes(member).decode("ascii", "replace"): int(float(score)) for member, score in answer}
