"""D02 (a failed leg is never said to be loaded), D11 (a store that does not answer)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeRemote, FaultyDevice, plugged
from numpy.typing import NDArray
from rig import SPEC, Rig, open_rig, prompt, slots_of

from flexkv import GetResult
from flexkv.model import SlotIds
from flexkv.transfer import Transfer

TARGETS = [7, 2, 9, 4]
SENTINEL = np.full(SPEC.block_bytes // 2, 0xDEAD, np.uint16).view(np.uint8)


def check_failed(rig: Rig, tokens: list[int], result: GetResult, failed: SlotIds) -> None:
    """Exactly `failed` device blocks are named, they hold the sentinel, and what counts as loaded
    is right.
    """
    rig.check(tokens, result, TARGETS)
    assert result.failed_device_blocks.tolist() == list(failed)
    for block in failed:
        assert np.array_equal(rig.device.read(int(block)), SENTINEL)
    loaded = TARGETS[: result.loaded // 4]
    assert not set(loaded) & set(result.failed_device_blocks.tolist())


async def get(rig: Rig, tokens: list[int]) -> GetResult:
    rig.device.wipe()
    result: GetResult = await rig.kv.get_async(tokens, slots_of(TARGETS))
    return result


@pytest.mark.parametrize("kind", ["EIO", "short"])
@pytest.mark.parametrize("chunk_blocks", [1, 2, 4])
async def test_d02_a_read_that_fails_for_a_moment(
    tmp_path: Path, chunk_blocks: int, kind: str
) -> None:
    tokens = prompt(1, 4)
    async with open_rig(tmp_path, chunk_bytes=chunk_blocks * SPEC.stride_bytes) as rig:
        await rig.put(tokens)
        await rig.push_out()
        faults = rig.faults()
        faults.add("read", kind, skip=2, times=1)
        result = await get(rig, tokens)
        assert (result.matched, result.loaded) == (16, 8)
        check_failed(rig, tokens, result, np.array([9]))
        assert rig.count("failed_blocks", source="disk", target="host") == 1
        faults.clear()
        assert (await get(rig, tokens)).loaded == 16, "the stored block was still good"


async def test_d02_a_damaged_block_leaves_the_index(tmp_path: Path) -> None:
    tokens = prompt(1, 4)
    async with open_rig(tmp_path) as rig:
        await rig.put(tokens)
        await rig.push_out()
        faults = rig.faults()
        faults.add("read", "flip", skip=2, times=1)
        result = await get(rig, tokens)
        assert result.loaded == 8
        check_failed(rig, tokens, result, np.array([9]))
        assert rig.count("damaged_blocks", tier="disk") == 1
        faults.clear()
        await rig.push_out(901)
        assert (await get(rig, tokens)).matched == 8
        await rig.put(tokens)
        assert (await get(rig, tokens)).loaded == 16


@pytest.mark.parametrize("tier", ["host", "disk", "staging"])
async def test_d02_a_device_copy_that_fails(tmp_path: Path, tier: str) -> None:
    """The second of two copies, each of two blocks; it is not the store's fault."""
    tokens = prompt(1, 4)
    with plugged(FaultyDevice) as device:
        async with open_rig(tmp_path, device_backend=device) as rig:
            await rig.put(tokens)
            if tier != "host":
                await rig.push_out()
            if tier == "staging":
                lock = rig.kv.get_match(prompt(900, 8))
            rig.kv._stack.device.failures = 1
            rig.kv._stack.device.skip = 1
            result = await get(rig, tokens)
            assert result.loaded == 8
            check_failed(rig, tokens, result, np.array([9, 4]))
            for _ in range(5):
                rig.kv._stack.device.failures = 2
                assert (await get(rig, tokens)).loaded == 0
            rig.kv._stack.device.failures = 0
            assert (await get(rig, tokens)).loaded == 16, "the store lost what the device failed"
            if tier == "staging":
                lock.cancel()


async def test_d02_a_put_whose_copy_fails_says_so_and_stores_nothing(tmp_path: Path) -> None:
    from flexkv import TransferError

    tokens = prompt(1, 4)
    with plugged(FaultyDevice) as device:
        async with open_rig(tmp_path, device_backend=device) as rig:
            rig.kv._stack.device.to_device = False
            rig.kv._stack.device.failures = 1
            with pytest.raises(TransferError, match="2 of 4"):
                await rig.put(tokens)
            assert (await get(rig, tokens)).matched == 0
            await rig.put(tokens)
            assert (await get(rig, tokens)).loaded == 16


async def get_beside_others(rig: Rig, tokens: list[int]) -> tuple[Transfer, GetResult, int]:
    """Get, and count the beats of something else that is due every 10 ms meanwhile."""
    loop = asyncio.get_running_loop()
    beats = 0

    def beat() -> None:
        nonlocal beats, handle
        beats += 1
        handle = loop.call_later(0.01, beat)

    handle = loop.call_later(0.01, beat)
    transfer = rig.kv.get_async(tokens, slots_of(TARGETS))
    result: GetResult = await transfer
    handle.cancel()
    return transfer, result, beats


@pytest.mark.parametrize("where", ["disk", "remote"])
async def test_d11_a_read_that_never_answers(tmp_path: Path, where: str) -> None:
    tokens = prompt(1, 4)
    with plugged(FakeRemote) as remote:
        settings: dict[str, Any] = {"disk_backend": remote} if where == "remote" else {}
        async with open_rig(tmp_path, transfer_timeout_ms=100, **settings) as rig:
            await rig.put(tokens)
            await rig.push_out()
            gate = (rig.store.faults if where == "remote" else rig.faults()).hold("read")
            rig.device.wipe()
            before: NDArray[np.uint8] = rig.device.read(TARGETS[0]).copy()
            transfers = []
            for _ in range(6):
                transfer, result, beats = await get_beside_others(rig, tokens)
                assert (result.loaded, result.timed_out, result.cancelled) == (0, True, False)
                assert result.failed_device_blocks.tolist() == TARGETS
                assert result.elapsed_ms >= 100
                assert beats, "the loop stalled until the deadline"
                transfers.append(transfer)
            assert rig.count("timed_out_transfers", kind="get") == 6
            gate.open()
            for transfer in transfers:
                await transfer.quiesced()
            for block in TARGETS:
                assert np.array_equal(rig.device.read(block), before), "a late answer landed"
            await rig.check_idle()
            transfer, result, _ = await get_beside_others(rig, tokens)
            rig.check(tokens, result, TARGETS)
            assert (result.loaded, result.timed_out) == (16, False)


async def test_d11_a_put_that_times_out_breaks_its_promise_and_keeps_the_books(
    tmp_path: Path,
) -> None:
    from flexkv import TransferError
    from flexkv.testing.faults import Gate

    with plugged(FaultyDevice) as device:
        async with open_rig(tmp_path, transfer_timeout_ms=50, device_backend=device) as rig:
            gate = rig.kv._stack.device.gate = Gate()
            transfer = rig.start_put(prompt(1, 4))
            with pytest.raises(TransferError, match="in time"):
                await transfer
            assert not transfer._quiet.is_set(), "the device slots are still being read"
            gate.open()
            await transfer.quiesced()
            await rig.put(prompt(2, 4))
            assert (await rig.get(prompt(2, 4))).loaded == 16
