"""Wires move blocks beside the loop's other work, many or few."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from flexkv.cluster import tcp
from flexkv.cluster.blocks import Passage
from flexkv.memory import Arena
from flexkv.testing.guard import ticking

SIZE, BLOCKS = 1 << 20, 48
STALL_LIMIT_MS = 100  # as in test_stall: what is plainly wrong


@pytest.mark.parametrize("at_once", [1, BLOCKS])  # on the loop, and in threads
async def test_blocks_that_pass_do_not_stall_the_loop(at_once: int) -> None:
    threads = anyio.CapacityLimiter(2)
    listener = tcp.listen_at("127.0.0.1", 0)
    out = await tcp.connect_to(f"127.0.0.1:{listener.getsockname()[1]}", threads)
    await anyio.wait_readable(listener)
    into = tcp.Wire(listener.accept()[0], threads)
    listener.close()
    source, target = (Arena(BLOCKS, SIZE, huge_pages=False) for _ in range(2))
    source.rows(0, BLOCKS)[:] = np.random.default_rng(3).integers(0, 256, (BLOCKS, SIZE), np.uint8)
    keys = np.arange(2, 2 * BLOCKS + 2, dtype=np.uint64).reshape(BLOCKS, 2)
    slots = np.arange(BLOCKS, dtype=np.uint32)
    with ticking() as ticker, anyio.fail_after(60):
        for at in range(0, BLOCKS, at_once):
            part = slice(at, at + at_once)
            sent = Passage(source, slots[part], keys[part], SIZE)
            got = Passage(target, slots[part][::-1], keys[part], SIZE)
            async with anyio.create_task_group() as group:
                group.start_soon(out.send_blocks, sent)
                group.start_soon(into.receive_blocks, got)
            assert got.whole == at_once
            assert got.sums.tolist() == got.told.tolist() == sent.sums.tolist()
    assert ticker.worst_ms < STALL_LIMIT_MS
    moved = target.rows(0, BLOCKS)
    assert np.array_equal(moved if at_once == 1 else moved[::-1], source.rows(0, BLOCKS))
    for wire in (out, into):
        wire.close()
    del moved
    source.close()
    target.close()
