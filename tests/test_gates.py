"""Copies of blocks that change hands: held back until their step, refused after their time."""

from __future__ import annotations

import threading
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import pytest
from test_ranks import TOKENS, agent, fill, joined, manager, memory, slots

from flexkv.backends.cpu import CpuBackend
from flexkv.errors import TransferError
from flexkv.protocols import BlockCopy
from flexkv.ranks.gates import Gate

ONE = list(range(TOKENS))


async def test_a_save_that_comes_after_its_blocks_were_withdrawn_fails(tmp_path: Path) -> None:
    caches = memory()
    fill(caches, 1)
    async with manager(tmp_path / "s", 1) as (kv, server):
        with agent(tmp_path / "s", 0, 1, caches) as worker:
            await joined(server)
            worker.begin_step(2, withdrawn=[0, 7])
            plan = kv.put_match(ONE)
            plan.tag = 1, 0
            with pytest.raises(TransferError):
                await kv.launch(plan, slots(0))
            assert kv.get_match(ONE).matched == 0
            plan = kv.put_match(ONE)
            plan.tag = 2, 0  # whoever got them in that step
            assert (await kv.launch(plan, slots(0))).stored == TOKENS


class Held(CpuBackend):
    """Holds copies out of the device until `go` is set."""

    began, go = threading.Event(), threading.Event()

    async def copy(self, batch: BlockCopy) -> None:
        if not batch.to_device:
            self.began.set()
            await anyio.to_thread.run_sync(self.go.wait)
        await super().copy(batch)


async def test_a_step_that_takes_blocks_away_waits_for_the_copy_that_reads_them(
    tmp_path: Path,
) -> None:
    caches = memory()
    fill(caches, 2)
    first = caches[0][0].copy()
    Held.began.clear()
    Held.go.clear()
    async with manager(tmp_path / "s", 1) as (kv, server):
        with agent(tmp_path / "s", 0, 1, caches) as worker:
            worker._backend_class = Held
            await joined(server)
            save = kv.put_async(ONE, slots(0))
            await anyio.to_thread.run_sync(Held.began.wait)
            worker.begin_step(1, withdrawn=[5])  # of others: nothing to wait for
            begun = threading.Event()

            def begin() -> None:
                worker.begin_step(2, withdrawn=[0])
                caches[0][0] = 0  # the engine goes on, and writes
                begun.set()

            thread = threading.Thread(target=begin)
            thread.start()
            assert not begun.wait(0.05)
            Held.go.set()
            await anyio.to_thread.run_sync(thread.join)
            assert (await save).stored == TOKENS
            await kv.get_async(ONE, slots(9))
            assert np.array_equal(caches[0][9], first)


async def test_a_gate_opens_with_its_step_and_lets_later_owners_pass() -> None:
    gate = Gate(4, lambda: None)
    ids = np.array([1, 2], np.uint32)
    gate.begin(3)
    assert await gate.enter(1, 3, ids, to_device=True)
    assert gate.landing
    gate.leave(1)
    assert not gate.landing
    with anyio.move_on_after(0.02) as early:
        await gate.enter(2, 4, ids, to_device=False)
    assert early.cancelled_caught
    gate.begin(4, withdrawn=[2])
    assert not await gate.enter(2, 3, ids, to_device=False)
    assert await gate.enter(3, 3, ids[:1], to_device=False)
    assert await gate.enter(4, 4, ids, to_device=False)
