"""First layers first: copies to the device in ranges of layers, and whoever waits for each."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest
from test_ranks import TOKENS, agent, fill, joined, manager, memory, slots

from flexkv import FlexKVConfig, KVManager
from flexkv.backends.cpu import CpuBackend
from flexkv.errors import TransferError
from flexkv.layerwise import cut_by_layers
from flexkv.model import DEVICE, HOST, PRIORITY_GET, Copy, KVSpec, Span, TransferGraph
from flexkv.protocols import BlockCopy
from flexkv.ranks.loads import Loads

ALL = 10


def graph_of(*ops: Copy) -> TransferGraph:
    keys = np.zeros((ALL, 2), np.uint64)
    blocks = np.arange(ALL, dtype=np.uint32)
    return TransferGraph(ops, blocks, keys, np.zeros(ALL, np.bool_), DEVICE, PRIORITY_GET)


def leg(source: str, target: str, count: int, **links: tuple[int, ...]) -> Copy:
    ids = np.arange(count, dtype=np.uint32)
    return Copy(Span(source, ids), Span(target, ids), np.arange(count), **links)


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 32])
@pytest.mark.parametrize("chunk", [1, 2, 3, 9, 10, 11])
def test_a_copy_is_cut_into_ranges_two_at_a_time_that_cover_every_layer_once(
    layers: int, chunk: int
) -> None:
    cut = cut_by_layers(graph_of(leg(HOST, DEVICE, ALL, joins=(4,))), layers, chunk)
    reached = 0
    for number, op in enumerate(cut.ops):
        two = (number - 2,) if number > 1 else ()
        one = (number - 1,) if op.is_last and number else ()
        assert op.after == two + one
        assert op.joins == ((4,) if number < 2 else ())
        first, stop = op.layers or (0, layers)
        assert first == reached < stop
        reached = stop
        assert op.is_last == (stop == layers)
    assert reached == layers
    assert sum(op.size_bytes(1001) for op in cut.ops) == 1001
    assert len(cut.ops) == max(1, min(layers, ALL // chunk))


def test_ranges_under_way_have_a_worker_each_and_the_last_one_its_own() -> None:
    chains = cut_by_layers(graph_of(leg(HOST, DEVICE, ALL)), 7, 1).chains()
    assert chains == [[0, 2, 4], [1, 3, 5], [6]]


def test_a_chain_goes_on_with_what_waits_for_its_end_alone() -> None:
    read, copy = leg("disk", HOST, ALL), leg(HOST, DEVICE, ALL)
    graph = graph_of(read, replace(copy, after=(0,)), read, replace(copy, after=(2,)))
    assert graph.chains() == [[0, 1], [2, 3]]
    late = replace(read, after=(0,))  # its predecessor has been gone on with: others must not wait
    assert graph_of(*graph.ops, late, replace(copy, after=(0, 4))).chains()[2:] == [[4], [5]]


def test_only_what_the_host_holds_is_cut_and_other_ops_still_wait_for_the_right_ones() -> None:
    read = leg("disk", HOST, ALL)
    graph = graph_of(leg(HOST, DEVICE, ALL), read, leg(HOST, DEVICE, ALL, after=(1,)))
    cut = cut_by_layers(graph, 4, 2)
    assert [op.layers for op in cut.ops] == [(0, 1), (1, 2), (2, 3), (3, 4), None, None]
    assert cut.ops[4].source.place == "disk"
    assert cut.ops[5].after == (4,)


class FailsAtLayer(CpuBackend):
    """Fails every copy to the device of the layer before the last, late."""

    async def copy(self, batch: BlockCopy) -> None:
        if batch.to_device and batch.layers is not None and batch.layers[0] == 2:
            for _ in range(20):  # turns of the loop: others go on meanwhile
                await anyio.lowlevel.checkpoint()
            raise TransferError("injected")
        await super().copy(batch)


@pytest.mark.parametrize("works", [True, False])
async def test_bytes_are_the_same_and_a_block_counts_only_with_all_its_layers(works: bool) -> None:
    spec = KVSpec.uniform(4, 2, 16, "float32", tokens_per_block=TOKENS)
    caches = [np.random.default_rng(i).random((2, 32, TOKENS, 2, 16), np.float32) for i in range(4)]
    config = FlexKVConfig.load(
        model="m", spec=spec, host_cache_bytes="4MiB", huge_pages=False, chunk_bytes=8192
    )
    tokens = list(range(8 * TOKENS))
    async with KVManager(config) as kv:
        kv.register(caches, axes="PBNHD")
        await kv.put_async(tokens, slots(*range(8)))
        if not works:
            kv._stack.device.__class__ = FailsAtLayer
        plan = kv.get_match(tokens)
        got = await kv.launch(plan, slots(*range(16, 24)), layerwise=True)
        assert got.loaded == (len(tokens) if works else 0)
        same = [np.array_equal(cache[:, 16:24], cache[:, 0:8]) for cache in caches]
        assert same == [True, True, works, works]
        assert got.size_bytes == 8 * spec.block_bytes // (1 if works else 2)
        moved = kv.telemetry.snapshot()["transfer_blocks"]
        assert sum(n for labels, n in moved.items() if "target='device'" in str(labels)) in (8, 0)


class Slow(CpuBackend):
    """Holds copies behind the first layer back until `go` is set."""

    go = threading.Event()

    async def copy(self, batch: BlockCopy) -> None:
        if batch.layers is not None and batch.layers[0] > 0:
            await anyio.to_thread.run_sync(self.go.wait)
        await super().copy(batch)


async def test_the_first_layer_is_waited_for_while_the_last_one_has_not_landed(
    tmp_path: Path,
) -> None:
    caches = memory()
    fill(caches, 1)
    Slow.go.clear()
    tokens, blocks = list(range(4 * TOKENS)), [10, 11, 12, 13]
    async with manager(tmp_path / "s", 1, chunk_bytes=4096) as (kv, server):
        with agent(tmp_path / "s", 0, 1, caches, Slow) as worker:
            await joined(server)
            await kv.put_async(tokens, slots(0, 1, 2, 3))
            plan = kv.get_match(tokens)
            plan.tag = 0, 1
            load = kv.launch(plan, slots(*blocks), layerwise=True)

            def wait(layer: int | None, timeout_s: float) -> tuple[int, ...] | None:
                return worker.wait_loaded(1, 4, layer, timeout_s)

            assert await anyio.to_thread.run_sync(wait, 0, 5.0) == ()
            assert np.array_equal(caches[0][10:14], caches[0][0:4])
            assert not load.done
            assert not np.array_equal(caches[1][10:14], caches[1][0:4])
            Slow.go.set()
            assert await anyio.to_thread.run_sync(wait, 1, 5.0) == ()
            assert np.array_equal(caches[1][10:14], caches[1][0:4])
            assert await anyio.to_thread.run_sync(wait, None, 5.0) == ()
            assert (await load).loaded == len(tokens)


async def test_a_load_that_nobody_brings_is_given_up_when_the_time_is_over(tmp_path: Path) -> None:
    async with manager(tmp_path / "s", 1) as (kv, server):
        with agent(tmp_path / "s", 0, 1, memory()) as worker:
            await joined(server)
            await kv.put_async(list(range(TOKENS)), slots(0))
            start = time.monotonic()
            assert await anyio.to_thread.run_sync(worker.wait_loaded, 1, 1, 0, 0.2) is None
            assert 0.15 < time.monotonic() - start < 3
            while server.joined < 2:  # it parted, and comes back
                await anyio.to_thread.run_sync(server.wait_ready, 0.01)


def test_loads_are_lost_with_the_manager_unless_they_are_over() -> None:
    loads = Loads(2)
    loads.joined(0)
    loads.landed(1, (0, 1), 3)
    loads.over(2, (7,))
    assert loads.wait(1, 3, 0, 0) == ()
    assert loads.wait(1, 3, 1, 0) is None
    loads.landed(3, None, 3)
    loads.parted()
    assert loads.wait(3, 3, None, 5) is None
    assert loads.wait(2, 3, 0, 5) == (7,)
    loads.joined(4)
    assert loads.wait(4, 3, 0, 5) is None
    loads.over(5, ())
    assert loads.wait(5, 3, 0, 5) == ()
