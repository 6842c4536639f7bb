"""A disk tier's codec in virtual time: `CodedLeg` (a leg whose blocks are encoded or decoded by
cores before or behind it, share by share, as `flexkv.encodedstore` does) - `coding_by` (a codec's
figures from rates that `flexkv calibrate` measured, or from those below).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from flexkv import plugins
from flexkv.coding import MOST_CORES, Coding
from flexkv.errors import ConfigError
from flexkv.model import PAGE_BYTES, KVSpec
from flexkv.sim.serving.legs import Cost, CostOf, Leg, Wire
from flexkv.sim.serving.tasks import Happening, Task, Tasks
from flexkv.tiercodec import TierCodec

# of one core of a Sapphire Rapids VM, bfloat16: `flexkv bench codec` (docs/codecs.md)
RATES: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "int8": {"encode_bytes_per_s": 1.1e9, "decode_bytes_per_s": 3.0e9},
        "int4": {"encode_bytes_per_s": 1.0e9, "decode_bytes_per_s": 2.5e9},
    }
)


def coding_by(
    name: str, spec: KVSpec, rates: Mapping[str, Any] = RATES, cores: int = MOST_CORES
) -> Coding:
    """Return the figures of a codec for blocks of a spec, in slots of whole pages.

    Args:
        rates: by codec, its "encode_bytes_per_s" and "decode_bytes_per_s" on one core.

    Raises:
        PluginError, ConfigError: there is no such codec, it gains nothing, or has no rates.
    """
    stored = TierCodec(name, plugins.load(plugins.CODECS, name)()).stored_bytes(spec)
    try:
        encode, decode = (float(rates[name][f"{v}_bytes_per_s"]) for v in ("encode", "decode"))
    except KeyError as error:
        raise ConfigError(
            f"codec {name!r} has no rates, only {sorted(rates)} have: run `flexkv calibrate` where "
            "it is installed and give its file as --profile"
        ) from error
    slot_bytes = -(-stored // PAGE_BYTES) * PAGE_BYTES
    return Coding(spec.block_bytes, slot_bytes, encode, decode, min(MOST_CORES, cores))


class CodedLeg(Leg):
    """One direction of a store behind a codec; the cores are a wire that may carry other work."""

    __slots__ = ("_codec", "_coding", "_reads")

    def __init__(
        self, tasks: Tasks, wire: Wire, cost: CostOf, coding: Coding, cores: Wire, *, reads: bool
    ) -> None:
        super().__init__(tasks, wire, cost)
        self._coding, self._reads = coding, reads
        rate = coding.decode_bytes_per_s if reads else coding.encode_bytes_per_s
        one_s = coding.block_bytes / rate
        self._codec = Leg(
            tasks, cores, lambda blocks: Cost(blocks * one_s / coding.cores, blocks * one_s)
        )

    def move(self, blocks: int) -> Happening:
        """Send a batch now; return when its last share is through both stages."""
        over, shares = Happening(), self._coding.shares(blocks)
        left = [shares]

        def share(count: int) -> Task:
            stages = (super(CodedLeg, self).move, self._codec.move)
            for stage in stages if self._reads else stages[::-1]:
                yield stage(count)
            left[0] -= 1
            if not left[0]:
                self._tasks.happen(over)

        for number in range(shares):
            first = number * self._coding.share_blocks
            self._tasks.spawn(share(min(self._coding.share_blocks, blocks - first)))
        return over
