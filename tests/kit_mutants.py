"""Plug-ins with one bug each, which the kit must find: `MUTANTS`. Run by test_kit_mutants.py.

`mutant` names the tests of the kit, the test that must fail, and words of its message. A test class
is made of each, so that pytest can run this file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time as clock
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import anyio
import numpy as np
import pytest
from kit_samples import (
    Int8,
    Patient,
    PatientHarness,
    Plain,
    Queue,
    ShelfDevice,
    ShelfDeviceHarness,
)
from numpy.typing import NDArray

from flexkv._core import lib
from flexkv.backends.cpu import CpuBackend
from flexkv.backends.disk import DiskBackend
from flexkv.completion import Completions, Ticket
from flexkv.errors import TransferError
from flexkv.model import DAMAGED, FAILED, LANDED, BlockIds, BoolArray, KVSpec, SlotIds, Statuses
from flexkv.policies.lru import LRU
from flexkv.protocols import (
    BlockCopy,
    BlockIO,
    DeviceInfo,
    PolicyContext,
    Recovered,
    Region,
    RegionHandle,
    Services,
)
from flexkv.testing import (
    CodecHarness,
    CodecTests,
    DeviceBackendTests,
    DirectStorageTests,
    EvictionPolicyTests,
    PolicyHarness,
    StorageBackendTests,
)
from flexkv.testing.built_in import CpuHarness, DiskHarness

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug, the test that kills it, and what that test must say."""

    name: str
    bug: str
    killed_by: str
    says: str


MUTANTS: list[Mutant] = []
_KITS: dict[type[Any], type[Any]] = {
    DeviceBackendTests: CpuHarness,
    StorageBackendTests: DiskHarness,
    DirectStorageTests: ShelfDeviceHarness,
    EvictionPolicyTests: PolicyHarness,
    CodecTests: CodecHarness,
}


def mutant(tests: type[Any], killed_by: str, says: str) -> Callable[[type[Any]], type[Any]]:
    """Enter a class whose docstring names its bug."""

    def enter(plugin: type[Any]) -> type[Any]:
        @pytest.fixture
        def harness(self: Any) -> Any:
            return _KITS[tests](plugin)

        name = plugin.__name__
        made = {"harness": harness, "limit_s": 4.5, "__module__": __name__}
        globals()[f"Test{name}"] = type(f"Test{name}", (tests,), made)
        assert plugin.__doc__
        MUTANTS.append(Mutant(name, plugin.__doc__, killed_by, says))
        return plugin

    return enter


device = DeviceBackendTests
store = StorageBackendTests
direct = DirectStorageTests
policy = EvictionPolicyTests
codec = CodecTests


# --- devices


@mutant(device, "test_blocks_come_back_in_every_layout[PBNHD-PNHD]", "do not hold their blocks")
class WrongStride(CpuBackend):
    """The distance from block to block is wrong by one element in one layer."""

    async def copy(self, batch: BlockCopy) -> None:
        planes = list(batch.region.planes)
        planes[-1] = replace(planes[-1], block_stride=planes[-1].block_stride - 2)
        await super().copy(replace(batch, region=replace(batch.region, planes=tuple(planes))))


@mutant(device, "test_a_copy_waits_for_hardware_that_stands_still", "but copy has returned")
class EarlyCompletion(CpuBackend):
    """copy returns when the work is queued, not when it is done."""

    async def copy(self, batch: BlockCopy) -> None:
        if len(batch) < 2:
            return await super().copy(batch)
        self.running = asyncio.ensure_future(super().copy(batch))
        await asyncio.sleep(0)


@mutant(device, "test_blocks_of_random_shapes_and_layouts_come_back", "do not hold their blocks")
class DroppedBlock(CpuBackend):
    """The last block of a batch is left out."""

    async def copy(self, batch: BlockCopy) -> None:
        part = slice(0, max(1, len(batch) - 1)) if len(batch) else slice(0, 0)
        blocks, slots = batch.device_blocks[part], batch.host_slots[part]
        await super().copy(replace(batch, device_blocks=blocks, host_slots=slots))


@mutant(device, "test_random_splits_and_permutations_keep_the_order", "item i pairs")
class SortedSlots(CpuBackend):
    """Slots are sorted for longer runs, the blocks that pair with them are not."""

    async def copy(self, batch: BlockCopy) -> None:
        await super().copy(replace(batch, host_slots=np.sort(batch.host_slots)))


@mutant(device, "test_a_region_is_never_taken_for_one_that_is_gone", "must not outlive it")
class StaleRegion(CpuBackend):
    """Planes are remembered by the id of the region, which is given away again."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Any] = {}

    async def copy(self, batch: BlockCopy) -> None:
        planes = self.known.setdefault(id(batch.region), batch.region.planes)
        await super().copy(replace(batch, region=replace(batch.region, planes=planes)))


@mutant(device, "test_nothing_blocking_is_called_on_the_loop", "time.sleep on the event loop")
class Sleeping(CpuBackend):
    """The hardware is polled with sleeps."""

    async def copy(self, batch: BlockCopy) -> None:
        clock.sleep(0.001)  # noqa: ASYNC251 - the bug
        await super().copy(batch)


@mutant(
    device,
    "test_large_copies_do_not_keep_the_loop_from_running[False]",
    "keeps the event loop from running",
)
class OnTheLoop(CpuBackend):
    """Copies of any size are made on the event loop."""

    async def open(self, services: Services) -> None:
        await super().open(replace(services, settings={"inline_bytes": 1 << 40}))


@mutant(
    device, "test_giving_up_takes_effect_at_once_and_close_waits", "a caller that was cancelled"
)
class Clinging(CpuBackend):
    """A caller that gives up is kept until the copy is over."""

    async def copy(self, batch: BlockCopy) -> None:
        work = asyncio.ensure_future(super().copy(batch))
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        return work.result()


@mutant(device, "test_giving_up_takes_effect_at_once_and_close_waits", "aclose returned while")
class HastyClose(CpuBackend):
    """Close forgets copies whose callers gave up."""

    async def aclose(self) -> None:
        self._tickets.clear()
        await super().aclose()


@mutant(device, "test_closing_twice_or_unopened_is_fine", "aclose does not end")
class HangingClose(CpuBackend):
    """A second close waits for what will never happen."""

    closed = False

    async def aclose(self) -> None:
        if self.closed:
            await anyio.Event().wait()
        self.closed = self._services is not None
        await super().aclose()


@mutant(device, "test_opening_and_closing_leaves_nothing_behind", "grew from")
class LeakingClose(CpuBackend):
    """Every open takes descriptors that close does not give back."""

    async def open(self, services: Services) -> None:
        self.kept = [os.dup(0) for _ in range(3)]
        await super().open(services)


@mutant(device, "test_probe_lists_devices_and_never_raises", "probe must never raise")
class RaisingProbe(CpuBackend):
    """probe raises where the driver is not there."""

    @classmethod
    def probe(cls) -> Sequence[DeviceInfo]:
        raise OSError("libdriver.so.1: cannot open shared object file")


_contexts: set[int] = set()


@mutant(device, "test_probe_creates_no_context", "must not create a context")
class CreatingProbe(CpuBackend):
    """probe creates a context, and a context does not survive a fork."""

    @classmethod
    def probe(cls) -> Sequence[DeviceInfo]:
        _contexts.add(os.getpid())
        return super().probe()

    async def open(self, services: Services) -> None:
        if _contexts - {os.getpid()}:
            raise RuntimeError("cannot initialize the driver again in a forked process")
        await super().open(services)


@mutant(
    device,
    "test_ids_out_of_range_are_refused_before_anything_moves[False-blocks0-slots0-device block 20 "
    "of 20]",
    "must be refused with InputError",
)
class UncheckedIds(CpuBackend):
    """Ids out of range are bent into it."""

    async def copy(self, batch: BlockCopy) -> None:
        blocks = np.minimum(batch.device_blocks, batch.region.blocks - 1)
        await super().copy(replace(batch, device_blocks=blocks))


@mutant(device, "test_an_empty_batch_is_nothing", "tickets are still out")
class MissingCompletion(CpuBackend):
    """An empty batch takes a ticket that nobody completes."""

    async def copy(self, batch: BlockCopy) -> None:
        await super().copy(batch)
        if not len(batch) and self._services is not None:
            self._services.completions.ticket()


@mutant(device, "test_many_copies_at_once_all_land", "completions came for tickets")
class TwiceCompleted(CpuBackend):
    """Both the callback and the waiter complete the ticket."""

    async def copy(self, batch: BlockCopy) -> None:
        assert self._services is not None
        ticket = self._services.completions.ticket()
        for _ in range(2):
            lib.fx_complete(ticket.address)
        await super().copy(batch)
        await ticket


@mutant(
    device, "test_a_copy_that_fails_says_so_and_the_next_one_works[False]", "with TransferError"
)
class Optimist(CpuBackend):
    """A copy that failed is logged, and that is all."""

    async def copy(self, batch: BlockCopy) -> None:
        with contextlib.suppress(TransferError):
            await super().copy(batch)


@mutant(device, "test_another_process_opens_a_region_and_copies_in_it", "another process could not")
class OwnAddresses(CpuBackend):
    """A handle holds addresses, which mean nothing in another process."""

    _exported: ClassVar[dict[bytes, Region]] = {}

    def export_region(self, region: Region) -> RegionHandle:
        handle = super().export_region(region)
        self._exported[handle.data] = region
        return handle

    def import_region(self, handle: RegionHandle) -> Region:
        return self._exported[handle.data]


@mutant(device, "test_blocks_come_back_in_every_layout[PBNHD-PNHD]", "wrote behind the block")
class Overrun(CpuBackend):
    """Whole pages are written, although blocks are smaller than their slots."""

    async def copy(self, batch: BlockCopy) -> None:
        await super().copy(batch)
        assert self._services is not None
        for slot in () if batch.to_device else batch.host_slots:
            self._services.arena.view(int(slot))[-1] = 0


@mutant(device, "test_layer_ranges_move_those_layers_only[PBNHD]", "must move layers 1 and 2")
class AllLayers(CpuBackend):
    """The range of layers is ignored."""

    async def copy(self, batch: BlockCopy) -> None:
        await super().copy(replace(batch, layers=None))


class _LosingTests(DeviceBackendTests):
    pass


_KITS[_LosingTests] = PatientHarness


@mutant(_LosingTests, "test_a_completion_that_never_comes_ends_in_time", "waits for ever")
class WithoutDeadline(Patient):
    """A completion that never comes is waited for."""

    def watch(self, completions: Completions, ticket: Ticket) -> None: ...


# --- stores


@mutant(store, "test_blocks_come_back_in_any_order", "of its 5120 bytes")
class ShortRead(DiskBackend):
    """A read that ended early is taken for success."""

    async def read(self, batch: BlockIO) -> Statuses:
        arena = self._crew._arena
        statuses = await super().read(batch)
        for slot in batch.host_slots[-1:]:
            arena.view(int(slot))[4096:] = 0xEE
        return statuses


@mutant(store, "test_damage_is_told_and_costs_only_its_block", "host memory holds other bytes")
class DamageLanded(DiskBackend):
    """Checksums are not looked at."""

    async def read(self, batch: BlockIO) -> Statuses:
        statuses = await super().read(batch)
        statuses[statuses == DAMAGED] = LANDED
        return statuses


@mutant(store, "test_what_is_stored_are_the_bytes_that_were_written", "the store holds other bytes")
class LostWrite(DiskBackend):
    """What was acknowledged is kept in memory, and the store vouches for itself."""

    async def write(self, batch: BlockIO) -> Statuses:
        self.kept: dict[bytes, Bytes] = getattr(self, "kept", {})
        for slot, key in zip(batch.host_slots, batch.keys, strict=True):
            self.kept[key.tobytes()] = self._crew._arena.view(int(slot)).copy()
        return np.zeros(len(batch), np.uint8)

    async def read(self, batch: BlockIO) -> Statuses:
        statuses = np.zeros(len(batch), np.uint8)
        for i, (slot, key) in enumerate(zip(batch.host_slots, batch.keys, strict=True)):
            found = self.kept.get(key.tobytes())
            if found is None:
                statuses[i] = FAILED
            else:
                self._crew._arena.view(int(slot))[:] = found
        return statuses


@mutant(store, "test_discarded_blocks_are_missing", "blocks 4 and 5 were discarded")
class ForgetfulDiscard(DiskBackend):
    """discard answers, and forgets nothing."""

    async def discard(self, batch: BlockIO) -> Statuses:
        held = self._table.holds(batch.store_slots, batch.keys)
        return np.where(held, 0, 3).astype(np.uint8)


@mutant(store, "test_discarded_blocks_do_not_come_back", "2 and 5 were discarded")
class UntilRestart(DiskBackend):
    """discard forgets in memory only."""

    async def discard(self, batch: BlockIO) -> Statuses:
        self._table.forget(batch.store_slots)
        return np.zeros(len(batch), np.uint8)


@mutant(store, "test_another_key_in_the_slot_is_missing", "but host memory holds block 2")
class AnyKey(DiskBackend):
    """A read takes what the slot holds, whatever was asked for."""

    async def read(self, batch: BlockIO) -> Statuses:
        return await super().read(replace(batch, keys=self._table.keys[batch.store_slots]))


@mutant(store, "test_reads_that_fail_in_part_say_which", "blocks 3 and 4 of 12 could not be read")
class AllOrNothing(DiskBackend):
    """One block that fails fails its batch."""

    async def read(self, batch: BlockIO) -> Statuses:
        statuses = await super().read(batch)
        return np.full_like(statuses, FAILED) if (statuses == FAILED).any() else statuses


@mutant(store, "test_an_empty_batch_is_answered", "one IOStatus per block")
class BareAnswer(DiskBackend):
    """A list comes back, or nothing at all."""

    async def write(self, batch: BlockIO) -> Any:
        statuses = await super().write(batch)
        return statuses if len(statuses) else None


@mutant(store, "test_another_identity_is_refused_or_finds_nothing", "another model was served")
class NoIdentity(DiskBackend):
    """The model is not part of the identity."""

    async def open(self, services: Services) -> Recovered | None:
        return await super().open(
            replace(services, identity=replace(services.identity, model="any"))
        )


@mutant(store, "test_committed_blocks_are_found_again", "but came back in slot")
class Orphans(DiskBackend):
    """Parents are not stored."""

    async def write(self, batch: BlockIO) -> Statuses:
        return await super().write(replace(batch, parents=None))


@mutant(
    store, "test_giving_up_takes_effect_at_once_and_close_waits[write]", "aclose returned while"
)
class HastyStoreClose(DiskBackend):
    """Close closes files under the threads that write records."""

    async def aclose(self) -> None:
        if self._store is not None:
            self._crew._out.clear()
        await super().aclose()


@mutant(store, "test_no_byte_lands_after_close_whoever_gave_up[1]", "after aclose returned")
class LateLanding(DiskBackend):
    """A read goes on after its caller and the store are gone."""

    async def aclose(self) -> None:
        await super().aclose()
        view = self._crew._arena.view(0)
        asyncio.get_running_loop().call_later(0.02, view.fill, 1)


@mutant(store, "test_nothing_blocking_is_called_on_the_loop", "on the event loop")
class ReadsOnTheLoop(DiskBackend):
    """A file is read on the event loop."""

    async def read(self, batch: BlockIO) -> Statuses:
        Path("/proc/self/stat").read_bytes()  # noqa: ASYNC240 - the bug
        return await super().read(batch)


@mutant(store, "test_a_second_owner_is_refused", "must be refused with FlexKVError")
class Unlocked(DiskBackend):
    """The directory of another owner is taken."""

    async def open(self, services: Services) -> Recovered | None:
        paths = [path / str(clock.monotonic_ns()) for path in services.settings["directories"]]
        return await super().open(replace(services, settings={"directories": paths}))


# --- direct storage


@mutant(direct, "test_damage_is_told_and_costs_only_its_block", "a flipped bit in block 3")
class DirectDamage(ShelfDevice):
    """Blocks that go past the host are not verified."""

    async def fetch(self, slot: int, key: bytes, region: Region, target: SlotIds) -> int:
        found = self.blocks.get(slot)
        if found is None or found[0] != key:
            return 3
        await self.bring(found[1], region, target)
        return LANDED


@mutant(direct, "test_stored_blocks_come_to_the_device", "host slots changed")
class Bouncing(ShelfDevice):
    """The blocks take the way over host memory that is not ours."""

    async def bring(self, data: bytes, region: Region, target: SlotIds) -> None:
        assert self._services is not None
        self._services.arena.view(0)[: len(data)] = np.frombuffer(data, np.uint8)
        await self.copy(BlockCopy(region, target, np.zeros(1, np.uint32), True))


@mutant(direct, "test_stored_blocks_come_to_the_device", "has other bytes")
class DirectOrder(ShelfDevice):
    """Device blocks are sorted, the stored ones that pair with them are not."""

    async def read_into(self, batch: BlockIO, region: Region, device_blocks: SlotIds) -> Statuses:
        return await super().read_into(batch, region, np.sort(device_blocks))


# --- policies


@mutant(policy, "test_victims_are_resident_leaves_that_nobody_pins[0]", "is pinned")
class Pinned(Queue):
    """Pins are not asked for."""

    def victims(self, count: int, evictable: Callable[[BlockIds], BoolArray]) -> BlockIds:
        return np.array(list(self.used)[::-1][:count], np.uint32)


@mutant(policy, "test_something_leaves_as_long_as_something_can", "is interior")
class Interior(Queue):
    """The oldest go first, with or without children."""

    def victims(self, count: int, evictable: Callable[[BlockIds], BoolArray]) -> BlockIds:
        return np.array(list(self.used)[:count], np.uint32)


@mutant(policy, "test_victims_are_resident_leaves_that_nobody_pins[0]", "one of them twice")
class Repeating(Queue):
    """The first victim is named again to make up the number."""

    def victims(self, count: int, evictable: Callable[[BlockIds], BoolArray]) -> BlockIds:
        found = super().victims(count, evictable)
        return np.concatenate([found, found[:1]])[:count]


@mutant(policy, "test_victims_are_resident_leaves_that_nobody_pins[0]", "is not in the tier")
class Ghosts(Queue):
    """Blocks that were removed stay candidates."""

    def removed(self, blocks: BlockIds) -> None:
        self.gone = [*getattr(self, "gone", []), *blocks.tolist()]
        super().removed(blocks)

    def victims(self, count: int, evictable: Callable[[BlockIds], BoolArray]) -> BlockIds:
        ghosts = np.array([b for b in getattr(self, "gone", []) if b not in self.used], np.uint32)
        return np.concatenate([ghosts, super().victims(count, evictable)])[:count]


@mutant(policy, "test_victims_are_resident_leaves_that_nobody_pins[0]", "too many")
class Generous(Queue):
    """More victims than were asked for."""

    def victims(self, count: int, evictable: Callable[[BlockIds], BoolArray]) -> BlockIds:
        return super().victims(count + 5, evictable)


@mutant(policy, "test_the_same_calls_have_the_same_answers", "told twice")
class Chance(Queue):
    """Victims are drawn without a seed."""

    def victims(self, count: int, evictable: Callable[[BlockIds], BoolArray]) -> BlockIds:
        found = super().victims(len(self.used), evictable)
        return np.array(random.SystemRandom().sample(found.tolist(), min(count, len(found))))


@mutant(policy, "test_the_same_calls_have_the_same_answers", "in another process")
class HashOrder(Queue):
    """The order of a set of strings decides."""

    def victims(self, count: int, evictable: Callable[[BlockIds], BoolArray]) -> BlockIds:
        found = super().victims(len(self.used), evictable)
        return np.array([int(name) for name in {str(block) for block in found}][:count], np.uint32)


@mutant(policy, "test_what_it_remembers_is_bounded", "more bytes in use")
class Diary(Queue):
    """Every access is remembered for ever."""

    def touched(self, blocks: BlockIds, now: float) -> None:
        self.diary: list[tuple[float, list[int]]] = getattr(self, "diary", [])
        self.diary.append((now, blocks.tolist()))
        super().touched(blocks, now)


@mutant(policy, "test_something_leaves_as_long_as_something_can", "could leave")
class Stuck(Queue):
    """The oldest block that cannot leave blocks the others."""

    def victims(self, count: int, evictable: Callable[[BlockIds], BoolArray]) -> BlockIds:
        known = np.array(list(self.used), np.uint32)
        mask = evictable(known)
        return known[: int(np.argmin(mask)) if not mask.all() else len(mask)][:count]


@mutant(policy, "test_asking_without_evicting_uses_nothing_up", "could leave")
class UsedUp(Queue):
    """A block that was named once is not named again."""

    def victims(self, count: int, evictable: Callable[[BlockIds], BoolArray]) -> BlockIds:
        found = super().victims(count, evictable)
        self.removed(found)
        return found


@mutant(policy, "test_two_tiers_do_not_know_of_each_other", "is not in the tier")
class Shared(LRU):
    """All instances look at the order of the tier that was opened last, or was used last."""

    ranked = False
    last: ClassVar[Any] = None

    def inserted(self, blocks: BlockIds, now: float) -> None:
        type(self).last = self.order
        super().inserted(blocks, now)

    def victims(self, count: int, evictable: Callable[[BlockIds], BoolArray]) -> BlockIds:
        return type(self).last.take(count)


@mutant(policy, "test_a_ranked_policy_leaves_the_order_to_the_index", "`ranked` promises")
class RankedLiar(Queue):
    """Says `ranked`, and has an order of its own."""

    ranked = True

    def open(self, context: PolicyContext) -> None:
        super().open(context)
        self.order = context.order

    def inserted(self, blocks: BlockIds, now: float) -> None:
        super().inserted(blocks, now)
        self.order.rank(blocks, -now)


# --- codecs


@mutant(codec, "test_encoding_fills_exactly_the_bytes_it_asked_for", "some were not written")
class Boaster(Plain):
    """Asks for more bytes than it fills."""

    def encoded_bytes(self, spec: KVSpec) -> int:
        return spec.block_bytes + 8

    def encode(self, spec: KVSpec, source: Bytes, target: Bytes) -> None:
        target[:, : spec.block_bytes] = source

    def decode(self, spec: KVSpec, source: Bytes, target: Bytes) -> None:
        target[:] = source[:, : spec.block_bytes]


@mutant(codec, "test_encoding_fills_exactly_the_bytes_it_asked_for", "wrote beyond")
class Understated(Plain):
    """The scales are not counted in the size."""

    def encode(self, spec: KVSpec, source: Bytes, target: Bytes) -> None:
        target[:] = source
        wide = np.lib.stride_tricks.as_strided(target, (len(target), target.shape[1] + 4))
        wide[:, -4:] = 0x11


@mutant(codec, "test_blocks_come_back", "says lossy = False")
class Untagged(Plain):
    """Drops a bit, and does not say so."""

    def encode(self, spec: KVSpec, source: Bytes, target: Bytes) -> None:
        target[:] = source & 0xFE


class _Float32(CodecHarness):
    dtypes = ("float32",)


class _LossyTests(CodecTests):
    pass


_KITS[_LossyTests] = _Float32


@mutant(_LossyTests, "test_zeros_come_back_as_zeros", "0 / 0")
class ZeroScale(Int8):
    """A block of zeros has no scale."""

    def decode(self, spec: KVSpec, source: Bytes, target: Bytes) -> None:
        super().decode(spec, source, target)
        scales = np.ascontiguousarray(source[:, :4]).view(np.float32)
        target[(scales == 0).ravel()] = 0xFF


@mutant(_LossyTests, "test_a_block_is_encoded_alike_in_any_batch", "when it comes alone")
class BatchScale(Int8):
    """One scale for the whole batch."""

    def scales(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        scales = super().scales(values)
        return np.full_like(scales, scales.max(initial=0))


@mutant(_LossyTests, "test_blocks_come_back", "more than max_error")
class Coarse(Int8):
    """Two bits are left of a value."""

    def scales(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return super().scales(values) * np.float32(127)
