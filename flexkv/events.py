"""What became readable and what left, for routers, other nodes and engines that want to know.

`EventLog.listen` opens an `EventStream`: `take` (what happened since the last time), `async for`
(the same, as it happens), `close`. Its first events tell what is readable when it is asked first,
so that who replays all of them always has exactly what each tier holds. Nothing is recorded while
nobody listens. A listener that is too slow is told everything anew: `cleared`, then `stored`; or it
calls `catch_up`, to be told changes only, and reads what there is in pieces (`survey`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from flexkv.index import PrefixIndex
from flexkv.model import READY, BlockIds, BoolArray, KeyArray
from flexkv.waiting import Signal

EventKind = Literal["stored", "removed", "cleared"]


def _no_keys() -> KeyArray:
    return np.empty((0, 2), np.uint64)


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """A change of what can be read in one tier.

    "stored": the blocks `keys` ([blocks, 2], uint64) have landed and were committed; `parents` are
    the keys of the blocks before them, zeros for first blocks of prompts. "removed": they were
    evicted, dropped as damaged or failed, or removed. "cleared": the tier is empty.
    """

    kind: EventKind
    tier: str
    keys: KeyArray = field(default_factory=_no_keys)
    parents: KeyArray = field(default_factory=_no_keys)

    def __len__(self) -> int:
        return len(self.keys)


class Survey:
    """What can be read in `tiers` when it is made, to be looked at in pieces while it changes."""

    def __init__(self, index: PrefixIndex, tiers: Collection[str]) -> None:
        self._index = index
        self._tiers = {name: tier for tier, name in enumerate(index.tiers) if name in tiers}
        self._found = [index.readable(tier) for tier in self._tiers.values()]
        self._above = [index.parents(blocks) for blocks in self._found]
        self._blocks = np.empty(0, np.uint32)

    def arrange(self) -> NDArray[np.int64]:
        """Take each block once; return the positions of their parents, -1 where those are not among
        them. It looks at nothing that changes: it may run in another thread.
        """
        blocks, first = np.unique(np.concatenate(self._found), return_index=True)
        parents = np.concatenate(self._above)[first]
        at = np.minimum(np.searchsorted(blocks, parents), max(0, len(blocks) - 1))
        self._blocks, self._found, self._above = blocks, [], []
        return np.where(blocks[at] == parents, at, -1) if len(blocks) else at

    def piece(
        self, positions: NDArray[np.int64]
    ) -> tuple[KeyArray, KeyArray, dict[str, BoolArray]]:
        """Return keys and parent keys of those blocks that can be read now, and in which tiers.

        An entry whose block has left may hold another block by now: then it is that one.
        """
        blocks, index = self._blocks[positions], self._index
        states = [index.states(tier, blocks) == READY for tier in self._tiers.values()]
        left = np.logical_or.reduce(states)
        blocks = blocks[left]
        readable = {name: here[left] for name, here in zip(self._tiers, states, strict=True)}
        return index.keys(blocks), index.parent_keys(blocks), readable


class EventStream:
    """Events for one listener, in the order in which they happened. It belongs to the thread of
    the manager's event loop, `pending` to everybody.
    """

    def __init__(
        self,
        everything: Callable[[], list[BlockEvent]],
        limit_blocks: int,
        *,
        count_dropped: Callable[[int], None],
        leave: Callable[[EventStream], None],
        survey: Callable[[Collection[str]], Survey],
    ) -> None:
        self._everything, self._limit_blocks = everything, limit_blocks
        self.survey = survey  # of given tiers; it takes nothing of what is to be told
        self._count_dropped, self._leave = count_dropped, leave
        self._events: list[BlockEvent] = []
        self._blocks = 0  # what the events weigh: their blocks, at least one each
        self._behind = True  # everything has to be told anew
        self._closed = False
        self._signal = Signal()
        self.dropped_blocks = 0

    @property
    def pending(self) -> bool:
        """Whether `take` has something to tell."""
        return self._behind or bool(self._events)

    def take(self) -> list[BlockEvent]:
        """Return what happened since the last time; the first time, and after more than
        `event_queue_blocks` blocks of events were not taken, everything there is, behind a
        "cleared" for each tier.
        """
        taken, self._events, self._blocks = self._events, [], 0
        if self._behind:
            self._behind = False
            return self._everything()
        return taken

    @property
    def behind(self) -> bool:
        """Whether changes were not recorded, so that `take` would tell everything anew."""
        return self._behind

    @property
    def closed(self) -> bool:
        """Whether nothing will be told any more."""
        return self._closed

    def catch_up(self) -> None:
        """Forget what was not taken, and record from now on; `survey` says what there is."""
        self._events, self._blocks, self._behind = [], 0, False

    async def changed(self) -> None:
        """Wait until there is something to take, or the stream is closed."""
        while not self._closed and not self.pending:
            await self._signal.wait()

    def add(self, event: BlockEvent) -> None:
        """Record an event."""
        if self._behind or self._closed:
            return
        self._events.append(event)
        self._blocks += max(1, len(event))
        if self._blocks > self._limit_blocks:
            dropped = sum(len(event) for event in self._events)
            self.dropped_blocks += dropped
            self._count_dropped(dropped)
            self._events, self._blocks, self._behind = [], 0, True
        self._signal.raise_()

    def close(self) -> None:
        """Stop listening. Twice is fine."""
        self._closed = True
        self._leave(self)
        self._signal.raise_()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[BlockEvent]:
        """Wait until there is something to take, and take it; ends when the stream is closed."""
        await self.changed()
        if self._closed:
            raise StopAsyncIteration
        return self.take()


class _Ear:
    """Hears what happens in one tier and tells every stream."""

    def __init__(self, index: PrefixIndex, tier: int, streams: list[EventStream]) -> None:
        self._index, self._name, self._streams = index, index.tiers[tier], streams

    def stored(self, blocks: BlockIds) -> None:
        keys, parents = self._index.keys(blocks), self._index.parent_keys(blocks)
        self._tell(BlockEvent("stored", self._name, keys, parents))

    def removed(self, blocks: BlockIds) -> None:
        self._tell(BlockEvent("removed", self._name, self._index.keys(blocks)))

    def cleared(self) -> None:
        self._tell(BlockEvent("cleared", self._name))

    def _tell(self, event: BlockEvent) -> None:
        for stream in self._streams:
            stream.add(event)


class EventLog:
    """Watches the index for as long as somebody listens: all tiers, or those with these names."""

    def __init__(
        self,
        index: PrefixIndex,
        limit_blocks: int,
        count_dropped: Callable[[int], None],
        tiers: Collection[str] | None = None,
    ) -> None:
        self._index, self._limit_blocks = index, limit_blocks
        watched = enumerate(index.tiers)
        self._tiers = [number for number, name in watched if tiers is None or name in tiers]
        self._count_dropped = count_dropped
        self._streams: list[EventStream] = []

    def listen(self) -> EventStream:
        """Open a stream; its first events tell what there is."""
        stream = EventStream(
            self._everything,
            self._limit_blocks,
            count_dropped=self._count_dropped,
            leave=self._part,
            survey=partial(Survey, self._index),
        )
        if not self._streams:
            for tier in self._tiers:
                self._index.watch(tier, _Ear(self._index, tier, self._streams))
        self._streams.append(stream)
        return stream

    @property
    def listened_to(self) -> bool:
        """Whether anything is recorded."""
        return bool(self._streams)

    def close(self) -> None:
        """Close every stream."""
        for stream in list(self._streams):
            stream.close()

    def _part(self, stream: EventStream) -> None:
        if stream in self._streams:
            self._streams.remove(stream)
        if not self._streams:
            for tier in self._tiers:
                self._index.watch(tier, None)

    def _everything(self) -> list[BlockEvent]:
        """What can be read where, ancestors first."""
        events = []
        for tier in self._tiers:
            name = self._index.tiers[tier]
            events.append(BlockEvent("cleared", name))
            blocks = self._index.readable(tier)
            blocks = blocks[np.argsort(self._index.depths(blocks), kind="stable")]
            if len(blocks):
                keys, parents = self._index.keys(blocks), self._index.parent_keys(blocks)
                events.append(BlockEvent("stored", name, keys, parents))
        return events
