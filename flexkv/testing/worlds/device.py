"""A simulated device: memory that is lent to transfers, and copies that take their time.

`Memory` (device blocks): `lend` (blocks for one transfer), `Loan.give_back` (spoils them at once) -
`WorldDevice` (the cpu backend whose copies land later, or not whole).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import numpy as np
from numpy.typing import NDArray

from flexkv._core import ffi, lib
from flexkv.backends.cpu import CpuBackend
from flexkv.backends.packing import PackedRegion
from flexkv.completion import Ticket
from flexkv.errors import TransferError
from flexkv.model import PAGE_BYTES, KVSpec
from flexkv.protocols import BlockCopy, Services
from flexkv.testing.worlds.hardware import Hardware, Journal

LAYERS, PARTS, TOKENS, HEAD_SIZE = 2, 2, 2, 1024
SPEC = KVSpec.uniform(LAYERS, 1, HEAD_SIZE, "uint8", tokens_per_block=TOKENS)
BLOCK_BYTES = SPEC.block_bytes
assert BLOCK_BYTES == 2 * PAGE_BYTES, "half of a block is a page, or codecs gain nothing"
MASK = 0x5A  # what the second half of a block is of the first one
_JUNK = 0xDB
CLOSE_S = 30.0


class Memory:
    """Device blocks; a free one holds junk, and whoever touches it is accused."""

    def __init__(self, blocks: int, journal: Journal) -> None:
        self.blocks, self._journal = blocks, journal
        part_bytes = TOKENS * HEAD_SIZE
        self._bytes = np.full((LAYERS, PARTS, blocks, part_bytes), _JUNK, np.uint8)
        shape = (PARTS, blocks, TOKENS, 1, HEAD_SIZE)
        self.caches = {f"layer.{i}": self._bytes[i].reshape(shape) for i in range(LAYERS)}
        self._free = list(range(blocks))
        self.loans: dict[int, Loan] = {}

    def lend(self, count: int, why: str, *, written: bool) -> Loan | None:
        """Blocks for a transfer that writes or reads them; None when too few are free."""
        if count > len(self._free):
            return None
        loan = Loan(self, [self._free.pop() for _ in range(count)], why, written)
        for block in loan.blocks:
            self.loans[block] = loan
        return loan

    def take_back(self, loan: Loan) -> None:
        """Spoil the blocks and lend them to the next one who asks."""
        for block in loan.blocks:
            del self.loans[block]
            self._bytes[:, :, block] = _JUNK
            self._free.append(block)

    def read(self, block: int) -> bytes:
        """The bytes of a block, in the order of the host."""
        return self._bytes[:, :, block].tobytes()

    def write(self, block: int, content: bytes) -> None:
        """Fill a block."""
        shape = (LAYERS, PARTS, TOKENS * HEAD_SIZE)
        self._bytes[:, :, block] = np.frombuffer(content, np.uint8).reshape(shape)

    def check(self, blocks: Sequence[int], *, written: bool) -> None:
        """Accuse a copy that touches blocks that are not lent for that."""
        for block in blocks:
            loan = self.loans.get(block)
            if loan is None or loan.written != written:
                verb = "written" if written else "read"
                owner = "nobody" if loan is None else loan.why
                self._journal.accuse("loan", f"device[{block}] is {verb}, but it is lent: {owner}")


class Loan:
    """Device blocks of one transfer."""

    def __init__(self, memory: Memory, blocks: list[int], why: str, written: bool) -> None:
        self._memory, self.blocks, self.why, self.written = memory, blocks, why, written
        self.open = True

    def give_back(self) -> None:
        """Let others have the blocks from now on; again does nothing."""
        if self.open:
            self.open = False
            self._memory.take_back(self)


class WorldDevice(CpuBackend):
    """The cpu backend with copies in virtual time. `begin` gives hardware and memory of a life."""

    begin: Callable[[Services], tuple[Hardware, Memory]]

    async def open(self, services: Services) -> None:
        """Take the services."""
        await super().open(services)
        self._flying: list[Ticket] = []
        self._arena = services.arena
        self._hardware, self._memory = type(self).begin(services)

    async def copy(self, batch: BlockCopy) -> None:
        """Copy the batch, at its start or at its end; or fail after a part of it."""
        place = "scatter" if batch.to_device else "gather"
        blocks, slots = batch.device_blocks.tolist(), batch.host_slots.tolist()
        hardware, fault = self._hardware, self._hardware.fault(place)
        if fault == "refuse":
            raise TransferError("the device does not take copies now")
        count = len(blocks)
        if fault == "EIO":
            count = hardware.chance(count, f"{place} fails", blocks[0])
        early = not batch.to_device and hardware.chance(3, "early", blocks[0]) == 0
        taken: NDArray[np.uint8] | None = None

        def land() -> None:
            self._memory.check(blocks, written=batch.to_device)
            if taken is None:
                self._move(batch, count)
            else:
                for row, slot in enumerate(slots[:count]):
                    self._arena.view(slot)[:BLOCK_BYTES] = taken[row]

        self._memory.check(blocks, written=batch.to_device)
        if early:
            held = [np.frombuffer(self._memory.read(block), np.uint8) for block in blocks]
            taken = np.stack(held)
        device = [("device", block) for block in blocks]
        host = [("host", slot) for slot in slots]
        reads, writes = (host, device) if batch.to_device else (device, host)
        if not batch.to_device:
            for slot in slots:
                self._arena.view(slot)[:BLOCK_BYTES] = 0xEE
        ticket = hardware.start(place, reads, writes, land, fault=fault)
        self._flying.append(ticket)  # `aclose` waits for it, whoever gives up
        await ticket
        if fault == "EIO":
            raise TransferError(f"a copy of {len(blocks)} blocks stopped after {count}")

    async def aclose(self) -> None:
        """Wait for what is in flight, but not for what never lands."""
        with anyio.move_on_after(CLOSE_S):
            for ticket in self._flying:
                await ticket
        await super().aclose()

    def _move(self, batch: BlockCopy, count: int) -> None:
        planes, layers, _ = PackedRegion(batch.region).select(batch.layers)
        lib.fx_copy_blocks(
            *(planes, layers, self._arena.address(0), self._arena.stride_bytes),
            ffi.from_buffer("uint32_t[]", np.ascontiguousarray(batch.host_slots, np.uint32)),
            ffi.from_buffer("uint32_t[]", np.ascontiguousarray(batch.device_blocks, np.uint32)),
            *(count, int(batch.to_device)),
        )
