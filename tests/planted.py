"""Bugs for the worlds to find: each is one that a busy person could write.

`PLANTED` (name -> context manager that puts the bug in, and takes it out again).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from flexkv.backends.disk import DiskBackend
from flexkv.background import Discarder
from flexkv.engine import Engine
from flexkv.ledger import Discard
from flexkv.model import DEVICE, IOStatus, Statuses
from flexkv.protocols import BlockIO


@contextmanager
def engine_gives_up_on_a_copy() -> Iterator[None]:
    """A copy that takes long is called failed: its slots are free while it is still in flight."""
    copy = Engine._copy

    async def impatient(self: Engine, *arguments: Any, **keywords: Any) -> Statuses:
        copying = asyncio.ensure_future(copy(self, *arguments, **keywords))
        done, _ = await asyncio.wait([copying], timeout=0.015)
        if not done:
            copying.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise TimeoutError("the device is slow today")
        return copying.result()

    with patch.object(Engine, "_copy", impatient):
        yield


@contextmanager
def engine_commits_a_spill_early() -> Iterator[None]:
    """A write to a store is called landed as soon as it is sent off."""
    move = Engine._move

    async def hasty(self: Engine, run: Any, copy: Any, *rest: Any) -> Statuses:
        moving = asyncio.ensure_future(move(self, run, copy, *rest))
        if DEVICE in (copy.source.place, copy.target.place) or copy.source.place != "host":
            return await moving
        return np.zeros(len(rest[0]), np.uint8)

    with patch.object(Engine, "_move", hasty):
        yield


@contextmanager
def background_frees_slots_early() -> Iterator[None]:
    """A slot is free again before its store has forgotten what it holds."""

    async def hasty(self: Discarder, discard: Discard) -> None:
        discard.tier.give(discard.slots)
        store = self._stores[discard.tier.name]
        await store.discard(BlockIO(discard.slots, discard.slots, discard.keys))

    with patch.object(Discarder, "_discard", hasty):
        yield


@contextmanager
def disk_trusts_what_it_reads() -> Iterator[None]:
    """A block whose checksum is wrong is taken for good."""
    read = DiskBackend._read

    async def trusting(self: DiskBackend, batch: BlockIO, part: Any) -> Statuses:
        statuses = await read(self, batch, part)
        statuses[statuses == IOStatus.DAMAGED] = IOStatus.LANDED
        return statuses

    with patch.object(DiskBackend, "_read", trusting):
        yield


@contextmanager
def disk_keeps_old_records() -> Iterator[None]:
    """A slot is written over without clearing its record first: a crash in between shows."""

    async def lazy(self: DiskBackend, slots: Any) -> Any:
        self._table.forget(slots)
        return np.ones(len(slots), np.bool_)

    with patch.object(DiskBackend, "_clear", lazy):
        yield


@contextmanager
def remote_trusts_what_it_reads() -> Iterator[None]:
    """Bytes of a server are taken for good, whatever their head says."""
    with patch("flexkv.backends.remote.store.judge", lambda *arguments: None):
        yield


PLANTED: dict[str, Callable[[], AbstractContextManager[None]]] = {
    bug.__name__: bug
    for bug in (
        engine_gives_up_on_a_copy,
        engine_commits_a_spill_early,
        background_frees_slots_early,
        disk_trusts_what_it_reads,
        disk_keeps_old_records,
        remote_trusts_what_it_reads,
    )
}
