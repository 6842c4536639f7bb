"""What must always be true, by number. Those that other suites cover whole (4 and 5: the state
machine of test_brain_model; 7: test_limits; 8: test_stall) are only pointed to there.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from model import DISK, World, keys_of
from rig import STRIDE, open_rig, prompt, slots_of
from stepping import open_stepping

from flexkv import CapacityError, FormatError, OwnershipError
from flexkv.groups import GroupKeys
from flexkv.testing.faults import flip_bit

# 1. A block is readable in a tier only after its bytes landed there and were committed


async def test_1_a_block_is_not_found_before_its_bytes_have_landed(tmp_path: Path) -> None:
    async with open_stepping(tmp_path) as (rig, steps):
        for held in ("before gather", "after gather"):
            name = len(held)
            steps.arm(held)
            put = rig.start_put(prompt(name, 2))
            await steps.reached.wait()
            assert rig.kv.get_match(prompt(name, 2)).matched == 0
            steps.release()
            await put
            plan = rig.kv.get_match(prompt(name, 2))
            assert plan.matched == 8
            plan.cancel()


async def test_1_a_match_stops_at_the_first_block_that_no_tier_can_read(tmp_path: Path) -> None:
    async with open_stepping(tmp_path, host=16) as (rig, steps):
        await rig.put(prompt(1, 2))
        steps.arm("before gather")
        put = rig.start_put(prompt(1, 8))
        await steps.reached.wait()
        plan = rig.kv.get_match(prompt(1, 8))
        assert plan.matched == 8
        plan.cancel()
        steps.release()
        await put


async def test_1_a_block_on_its_way_to_disk_is_not_readable_there(tmp_path: Path) -> None:
    async with open_stepping(tmp_path) as (rig, steps):
        steps.arm("after write")  # the record is written, the commit is not known yet
        await rig.start_put(prompt(1, 4))
        await steps.reached.wait()
        blocks = rig.kv._stack.index.find(
            rig.kv._stack.keyring.chain(np.array(prompt(1, 4)), rig.kv._stack.keyring.root(None))
        )
        assert (rig.kv._stack.index.states(1, blocks) != 2).all()
        steps.release()
        await rig.kv.flush()
        assert (rig.kv._stack.index.states(1, blocks) == 2).all()


# 2. State is per block, never per run of blocks


async def test_2_a_prefix_may_be_split_and_extended_while_it_is_in_flight(tmp_path: Path) -> None:
    first = prompt(1, 6)
    branches = [prompt(name, 6, shared=first[:8]) for name in (2, 3)]
    async with open_stepping(tmp_path, host=32) as (rig, steps):
        steps.arm("before gather")
        puts = [rig.start_put(first)]
        await steps.reached.wait()
        puts += [rig.start_put(branch, first=10 + 10 * i) for i, branch in enumerate(branches)]
        puts.append(rig.start_put([*first, *range(9000, 9008)], first=40))
        steps.release()
        results = await asyncio.gather(*puts)
        assert [result.new for result in results] == [24, 16, 16, 8]
        assert [result.stored for result in results] == [24, 24, 24, 32]
        for tokens in (first, *branches):
            assert (await rig.get(tokens)).loaded == 24


async def test_2_a_prefix_may_be_partly_evicted_while_the_rest_is_read(tmp_path: Path) -> None:
    async with open_stepping(tmp_path, spill="never") as (rig, steps):
        await rig.put(prompt(1, 8))
        rig.device.wipe()
        steps.arm("before scatter")
        get = rig.kv.get_async(prompt(1, 8)[:16], slots_of(range(20, 24)))
        await steps.reached.wait()
        await_put = rig.start_put(prompt(2, 4), first=40)  # pushes out the tail, not the rest
        steps.release()
        assert (await get).loaded == 16
        await await_put
        plan = rig.kv.get_match(prompt(1, 8))
        assert plan.matched == 16
        plan.cancel()


# 3. A slot with work in flight is never handed out


async def test_3_slots_of_a_cancelled_put_stay_out_until_its_copies_are_over(
    tmp_path: Path,
) -> None:
    async with open_stepping(spill="never", chunk_bytes=8 * STRIDE) as (rig, steps):
        steps.arm("before gather")
        put = rig.start_put(prompt(1, 8))
        await steps.reached.wait()
        put.cancel()
        with pytest.raises(CapacityError):
            await rig.start_put(prompt(2, 1), first=20)
        assert rig.kv.usage()["host"]["free"] == 0
        steps.release()
        await put
        await put.quiesced()
        assert (await rig.start_put(prompt(2, 8), first=20)).stored == 32


async def test_3_a_timed_out_get_keeps_its_blocks_until_it_has_quiesced(tmp_path: Path) -> None:
    async with open_stepping(transfer_timeout_ms=300) as (rig, steps):
        await rig.put(prompt(1, 8))
        rig.device.wipe()
        steps.arm("before scatter")
        get = rig.kv.get_async(prompt(1, 8), slots_of(range(8)))
        assert (await get).timed_out
        with pytest.raises(CapacityError):
            await rig.start_put(prompt(2, 1), first=20)
        steps.release()
        await get.quiesced()
        await rig.start_put(prompt(2, 1), first=20)


# 6. Nothing wrong is ever served


async def test_6_a_namespace_is_another_cache(tmp_path: Path) -> None:
    async with open_rig(tmp_path, host=32) as rig:
        await rig.put(prompt(1, 4), ("a",))
        for other in (None, ("b",), ("a", ""), ("", "a"), ("a", "a")):
            assert (await rig.get(prompt(1, 4), other)).loaded == 0
        await rig.put(prompt(1, 4), ("b",))
        for namespace in (("a",), ("b",)):
            assert (await rig.get(prompt(1, 4), namespace)).loaded == 16


async def test_6_damage_is_a_miss_counted_and_its_slot_is_used_again(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(prompt(1, 4))
        await rig.put(prompt(2, 8))
        index, keyring = rig.kv._stack.index, rig.kv._stack.keyring
        blocks = index.find(keyring.chain(np.array(prompt(1, 4)), keyring.root(None)))
        slot = int(index.slots(1, blocks)[2])
        data = max((tmp_path / "d0").iterdir(), key=lambda path: path.stat().st_size)
        flip_bit(data, slot * STRIDE + 99, 5)
        result = await rig.get(prompt(1, 4))
        assert result.loaded == 8
        assert result.failed_device_blocks.tolist() == [2]
        await rig.kv.flush()
        assert rig.kv.telemetry.value("damaged_blocks", tier="disk") == 1
        assert rig.kv.usage()["disk"]["free"] == 32 - 11
        assert rig.kv.get_match(prompt(1, 4)).matched == 8
        rig.kv._stack.plans.cancel_all()
        await rig.put(prompt(1, 4))
        assert (await rig.get(prompt(1, 4))).loaded == 16


# 9. The brain gives the same answer to the same sequence of calls


def brain_trace(seed: int) -> str:
    """A digest of every decision of the brain in a long random sequence."""
    chance, digest = random.Random(seed), hashlib.sha256()
    policy = chance.choice(["lru", "lfu", "slru", "fifo", "mru", "filo", "hazard"])
    world = World(8, 12, chance.choice(["through", "on_evict"]), policy)
    for _ in range(400):
        path = tuple(chance.randint(0, 2) for _ in range(chance.randint(1, 6)))
        verb = chance.randrange(8)
        if verb < 3:
            try:
                world.plan_put(path)
                world.launch_put(0)
            except CapacityError:
                digest.update(b"full")
        elif verb < 5:
            digest.update(bytes([world.get(path, prefetch=verb == 3)]))
        elif verb == 5:
            digest.update(bytes([world.ledger.remove(GroupKeys(keys_of(path)))]))
        else:
            world.spill()
            world.discard()
        for op in world.startable()[: chance.randint(0, 4)]:
            digest.update(op.copy.source.ids.tobytes() + op.copy.target.ids.tobytes())
            world.step(op, [chance.choice([0, 0, 0, 0, 1])] * chance.randint(1, 4))
    for tier in world.tiers.values():
        digest.update(f"{tier.free} {tier.evicted_blocks}".encode())
    digest.update(repr(sorted(world.memory[DISK].items())).encode())
    return digest.hexdigest()


def test_9_the_brain_does_not_depend_on_hash_seeds_or_chance() -> None:
    wanted = [brain_trace(seed) for seed in range(4)]
    assert [brain_trace(seed) for seed in range(4)] == wanted
    assert len(set(wanted)) == 4
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
        "from test_invariants import brain_trace; "
        "print(*[brain_trace(seed) for seed in range(4)])"
    )
    for hash_seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert done.stdout.split() == wanted


# 10. A second owner, a foreign format, another identity


async def test_10_a_second_manager_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(prompt(1, 4))
        with pytest.raises(OwnershipError):
            async with open_rig(tmp_path):
                pass
        assert (await rig.get(prompt(1, 4))).loaded == 16
    async with open_rig(tmp_path) as rig:
        assert (await rig.get(prompt(1, 4))).loaded == 16


@pytest.mark.parametrize("other", [{"model": "another"}, {"revision": "2"}, {"rank": "tp1/2"}])
async def test_10_another_identity_is_an_error_or_an_empty_cache_never_a_mixed_one(
    tmp_path: Path, other: dict[str, str]
) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(prompt(1, 4))
    with pytest.raises(FormatError):
        async with open_rig(tmp_path, **other):
            pass
    async with open_rig(tmp_path) as rig:  # the refusal changed nothing
        assert (await rig.get(prompt(1, 4))).loaded == 16
    async with open_rig(tmp_path, on_mismatch="clear", **other) as rig:
        assert rig.kv.usage()["disk"]["resident"] == 0
        assert (await rig.get(prompt(1, 4))).loaded == 0
