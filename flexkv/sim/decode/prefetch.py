"""Predictors of the next step's reads: predict, learn; and their score.

none: nothing. next-window: the newest blocks at the next position. markov: a chain over the jumps
of each stream of reads (+0, +1, +11 ...), learnt on the way. session: what the running sequences
read last. steps: the same for the sequences that a steps-to-execution hint announces. oracle: the
truth, the upper bound; never a result to quote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import ConfigError
from flexkv.sim.decode.workload import Access, Workload

Ids = NDArray[np.int64]
_JUMPS = 128  # jumps of -64 .. 62 blocks are told apart; the last state means any other
_NONE = np.zeros(0, np.int64)


class Predictor(Protocol):
    """Names blocks before they are asked for."""

    def learn(self, step: int, access: Access) -> None: ...

    def predict(self, step: int, lead: int) -> Ids:
        """Return the blocks that step + lead may read, most likely first; maybe repeated."""
        ...


class NoPredictor:
    """Prefetch nothing."""

    def learn(self, step: int, access: Access) -> None:
        """Learn nothing."""

    def predict(self, step: int, lead: int) -> Ids:
        """Return nothing."""
        return _NONE


class NextWindow(NoPredictor):
    """The newest `window_tokens` of every running sequence."""

    def __init__(self, workload: Workload, window_tokens: int = 48) -> None:
        self.workload, self.window_tokens = workload, window_tokens

    def predict(self, step: int, lead: int) -> Ids:
        """Return the window around the position of then."""
        then = step + lead
        batch = self.workload.batch(step)
        if then >= batch.first + batch.steps:
            return _NONE
        return self.workload.window(then, self.window_tokens)


class Oracle(NoPredictor):
    """What will be read."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def predict(self, step: int, lead: int) -> Ids:
        """Return the truth."""
        then = step + lead
        return self.workload.access(then).blocks if then < self.workload.steps else _NONE


class Session(NoPredictor):
    """What the running sequences read in their last step; with `hints`, those that run then."""

    def __init__(self, workload: Workload, hints: bool) -> None:
        self.workload, self.hints = workload, hints
        self._last: dict[int, Ids] = {}

    def learn(self, step: int, access: Access) -> None:
        """Remember each sequence's reads."""
        owners = self.workload.sequence[access.blocks]
        for sequence in self.workload.batch(step).sequences:
            self._last[sequence] = access.blocks[owners == sequence]

    def predict(self, step: int, lead: int) -> Ids:
        """Return the last reads of the sequences that are expected to run."""
        then = step + lead
        if then >= self.workload.steps:
            return _NONE
        batch = self.workload.batch(then if self.hints else step)
        known = [self._last[s] for s in batch.sequences if s in self._last]
        return np.concatenate(known) if known else _NONE


class Markov(NoPredictor):
    """A first-order chain over the jumps of each stream, one table for all streams."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._counts = np.zeros((_JUMPS, _JUMPS), np.int64)
        self._table_size = 0
        self._block = np.zeros(0, np.int64)  # by stream: the block read last
        self._jump = np.zeros(0, np.int64)
        self._streams = _NONE

    def learn(self, step: int, access: Access) -> None:
        """Count what followed what."""
        streams, blocks = access.streams, access.blocks
        top = int(streams.max()) + 1
        if top > len(self._block):
            more = top - len(self._block)
            self._block = np.concatenate((self._block, np.full(more, -1)))
            self._jump = np.concatenate((self._jump, np.full(more, _JUMPS - 1)))
        before = self._block[streams]
        same = (before >= 0) & (self._owner(before) == self._owner(blocks))
        jump = np.where(same, blocks - before + _JUMPS // 2, _JUMPS - 1)
        jump = np.where((jump < 0) | (jump >= _JUMPS), _JUMPS - 1, jump)
        old = self._jump[streams]
        known = (old != _JUMPS - 1) & (jump != _JUMPS - 1)
        np.add.at(self._counts, (old[known], jump[known]), 1)
        self._block[streams], self._jump[streams] = blocks, jump
        self._streams = streams

    def _owner(self, blocks: Ids) -> Ids:
        owner: Ids = self.workload.sequence[np.maximum(blocks, 0)]
        return owner

    def predict(self, step: int, lead: int) -> Ids:
        """Follow the likeliest jump `lead` times."""
        streams = self._streams
        blocks, jump = self._block[streams], self._jump[streams]
        likeliest = self._counts.argmax(axis=1)
        seen = self._counts.max(axis=1) > 0
        sure = np.ones(len(streams), np.bool_)
        for _ in range(lead):
            sure &= (jump != _JUMPS - 1) & seen[jump]
            jump = likeliest[jump]
            blocks = blocks + jump - _JUMPS // 2
        there = sure & (blocks >= 0) & (blocks < self.workload.blocks)
        named = blocks[there]
        found: Ids = named[self._owner(named) == self._owner(self._block[streams][there])]
        return found


def predictor(name: str, workload: Workload) -> Predictor:
    """Return a fresh predictor by name."""
    makers: dict[str, Callable[[], Predictor]] = {
        "none": NoPredictor,
        "next-window": lambda: NextWindow(workload),
        "markov": lambda: Markov(workload),
        "session": lambda: Session(workload, hints=False),
        "steps": lambda: Session(workload, hints=True),
        "oracle": lambda: Oracle(workload),
    }
    if name not in makers:
        raise ConfigError(f"no predictor {name!r}; known are {sorted(makers)}")
    return makers[name]()


@dataclass(slots=True)
class Score:
    """How a predictor did, in blocks, bytes and seconds."""

    issued: int = 0
    in_time: int = 0  # there when first asked for
    late: int = 0  # asked for while still on the way
    wasted: int = 0  # left the staging buffers unused, or still unused at the end
    missed: int = 0  # distinct reads of a step that went to a tier unannounced
    late_s: float = 0.0  # from being asked for to arrival, summed over late transfers
    block_bytes: float = 0.0

    @property
    def precision(self) -> float:
        """Return the share of prefetched blocks that were asked for."""
        return (self.in_time + self.late) / self.issued if self.issued else 0.0

    @property
    def recall(self) -> float:
        """Return the share of what had to be fetched that was prefetched."""
        wanted = self.in_time + self.late + self.missed
        return (self.in_time + self.late) / wanted if wanted else 0.0

    def as_json(self) -> dict[str, float]:
        """Return counts and ratios by name."""
        return {
            "issued_blocks": self.issued, "in_time_blocks": self.in_time,
            "late_blocks": self.late, "wasted_blocks": self.wasted, "missed_blocks": self.missed,
            "late_s": self.late_s, "wasted_bytes": self.wasted * self.block_bytes,
            "precision": self.precision, "recall": self.recall,
        }  # fmt: skip
