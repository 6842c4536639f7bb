"""A codec in virtual time, so that the disk tier of a world may keep blocks encoded.

`HalfCodec` (a block of a world is what its first half says: blocks of half the size, and whoever
encodes other bytes is told) - `HalfCodecLossy` (the same bytes under the keys of a lossy codec) -
`work_in_virtual_time` (an encoded store whose codec takes time but no threads).
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import anyio
import numpy as np
from numpy.typing import NDArray

from flexkv.encodedstore import EncodedStore, Work
from flexkv.model import KVSpec, SlotIds
from flexkv.protocols import API_VERSION
from flexkv.testing.worlds.device import BLOCK_BYTES, MASK
from flexkv.testing.worlds.hardware import Cell, Hardware

_HALF = BLOCK_BYTES // 2
_SIGN = 0xA5  # encoded bytes are no part of a decoded block


class HalfCodec:
    """Keeps the first half of a block, from which the second one follows."""

    flexkv_api: ClassVar[int] = API_VERSION
    lossy: ClassVar[bool] = False

    def encoded_bytes(self, spec: KVSpec) -> int:
        """Half of a block."""
        return _HALF

    def encode(self, spec: KVSpec, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
        """Keep what the rest follows from; AssertionError for bytes that are no block."""
        assert (source[:, :_HALF] ^ MASK == source[:, _HALF:BLOCK_BYTES]).all(), "no block"
        np.bitwise_xor(source[:, :_HALF], _SIGN, out=target)

    def decode(self, spec: KVSpec, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
        """Make both halves."""
        np.bitwise_xor(source, _SIGN, out=target[:, :_HALF])
        np.bitwise_xor(target[:, :_HALF], MASK, out=target[:, _HALF:BLOCK_BYTES])


class HalfCodecLossy(HalfCodec):
    """Says that it is lossy: it is part of the keys then."""

    lossy: ClassVar[bool] = True


CODECS = {"world-half": HalfCodec, "world-half-lossy": HalfCodecLossy}


def work_in_virtual_time(store: EncodedStore, hardware: Hardware, share_blocks: int) -> None:
    """Have `store` encode and decode as batches of `hardware`, `share_blocks` at a time."""
    store._share_bytes = share_blocks * BLOCK_BYTES
    store._in_thread = partial(_work, store, hardware)  # type: ignore[method-assign]


async def _work(
    store: EncodedStore, hardware: Hardware, work: Work, host_slots: SlotIds, slots: SlotIds
) -> None:
    decode = work.__name__ == "_decode"
    host: list[Cell] = [("host", slot) for slot in host_slots.tolist()]
    encoded: list[Cell] = [("encoded", slot) for slot in slots.tolist()]
    done, errors = anyio.Event(), []

    def land() -> None:
        try:
            store._work(work, host_slots, slots)
        except Exception as error:
            errors.append(error)
        done.set()

    if decode:
        for _, slot in host:  # nobody may take a slot for filled while it is being decoded
            hardware.arena.view(slot)[:BLOCK_BYTES] = 0xEE
    reads, writes = (encoded, host) if decode else (host, encoded)
    hardware.fly("decode" if decode else "encode", reads, writes, land)
    with anyio.CancelScope(shield=True):  # a thread cannot be called back either
        await done.wait()
    if errors:
        raise errors[0]
