"""What a decode run is told: Codec, CODECS, read_codecs, Pipeline, SERIAL, OVERLAPPED, Placement,
Settings.

All limits and thresholds of the simulator are here, with their units; nothing else has defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from flexkv.errors import ConfigError
from flexkv.sim.profiles import HardwareProfile

TIERS = ("hbm", "cxl", "dram")  # where blocks may lie, from near to far
PREDICTORS = ("none", "next-window", "markov", "session", "steps", "oracle")
POLICIES = ("lru", "lfu", "hot-warm-cold")


@dataclass(frozen=True, slots=True)
class Codec:
    """A codec's figures: `ratio` = encoded over raw bytes, scales included; rates in raw bytes.

    Costs grow with bytes: there is no constant per block.
    """

    name: str
    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    lossy: bool
    source: str

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1 or min(self.encode_bytes_per_s, self.decode_bytes_per_s) <= 0:
            raise ConfigError(
                f"codec {self.name!r}: the ratio lies in (0, 1], rates are > 0: {self}"
            )


_RATIO = "groups of 64 with 16-bit scale and zero point"
_ON_CHIP = (
    f"{_RATIO}; rate assumed: 2 instructions per 16-bit item on 132 x 128 lanes at 1.7 GHz, a"
    " quarter of it reached, dequantised inside the attention kernel"
)
_CONSTANT = f"{_RATIO}; the public prototype's 120 and 260 ns per block of 8,192 bytes, as a rate"
CODECS: Mapping[str, Mapping[str, Codec]] = MappingProxyType(
    {
        "accelerator": {
            "none": Codec("none", 1.0, 1e18, 1e18, False, "no work"),
            "int8": Codec("int8", 0.53, 3.5e12, 7e12, True, _ON_CHIP),
            "int4": Codec("int4", 0.28, 3.5e12, 7e12, True, _ON_CHIP),
        },
        "prototype": {
            "none": Codec("none", 1.0, 1e18, 1e18, False, "no work"),
            "int8": Codec("int8", 0.53, 8192 / 120e-9, 8192 / 120e-9, True, _CONSTANT),
            "int4": Codec("int4", 0.28, 8192 / 260e-9, 8192 / 260e-9, True, _CONSTANT),
        },
    }
)


def read_codecs(path: Path) -> dict[str, Codec]:
    """Read measured codecs from what `flexkv calibrate` wrote, or from a JSON object of that form.

    The form is {name: {"ratio", "encode_bytes_per_s", "decode_bytes_per_s"}}, the ratio being plain
    over encoded bytes, the rates those of plain bytes. Codecs without figures are left out.
    """
    try:
        data = json.loads(path.read_text())
        table = data["serving"]["facts"]["codecs"] if "serving" in data else data
        found = {
            name: Codec(
                name, 1 / entry["ratio"], entry["encode_bytes_per_s"], entry["decode_bytes_per_s"],
                bool(entry.get("lossy", name != "lossless")), f"measured, {path.name}",
            )
            for name, entry in table.items()
            if "ratio" in entry
        }  # fmt: skip
    except OSError as error:
        raise ConfigError(f"cannot read the codecs in {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{path} does not hold codec figures as `flexkv calibrate` writes them: {error!r}"
        ) from None
    return {"none": CODECS["accelerator"]["none"], **found}


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How transfers, codecs and compute share time.

    `one_at_a_time`: a single DMA takes demand, prefetch and migration in order of arrival, one
    request after another, each paying its whole latency. Otherwise every tier and codec is a server
    with its own queue depth, demand overtakes prefetch, and `lookahead_waves` waves of a step are
    asked for ahead of compute. What was read or prefetched stays on chip for `retain_steps` steps.
    """

    name: str
    one_at_a_time: bool
    lookahead_waves: int
    retain_steps: int
    max_prefetch_blocks: int  # per step
    max_prefetch_in_flight: int  # blocks
    lead_steps: int
    max_migrations_per_step: int = 4096  # blocks


SERIAL = Pipeline("serial", True, 1 << 30, 0, 48, 256, 2)
OVERLAPPED = Pipeline("overlapped", False, 4, 2, 4096, 8192, 1)
PIPELINES = {p.name: p for p in (SERIAL, OVERLAPPED)}


@dataclass(frozen=True, slots=True)
class Placement:
    """When a block is hot, warm or cold, and what follows. The same for every policy.

    hot: at most `hot_age_tokens` behind the newest token. warm: read at least `warm_reuse` times,
    last at most `warm_idle_steps` ago. cold: all others. A warm block in HBM is encoded after
    `encode_after_reads` reads as a warm one: encoding costs one raw read and `ratio` of a write,
    each later read saves 1 - ratio, so about three reads pay for it (ski rental).
    """

    hot_age_tokens: int = 64
    warm_reuse: int = 2
    warm_idle_steps: int = 64
    near_tokens: int = 768  # of the context, what starts in the second tier; the rest in the third
    near_waves: int = 1  # the first waves of a step stay in HBM: no compute hides a wait for them
    encode_after_reads: int = 3
    policy: str = "hot-warm-cold"

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"no placement policy {self.policy!r}; known are {list(POLICIES)}")


@dataclass(frozen=True)
class Settings:
    """One run: `orchestrated` uses placement, codec and predictor; a baseline keeps raw blocks in
    HBM, spills the least recently used ones, and prefetches nothing.
    """

    hardware: HardwareProfile
    pipeline: Pipeline = OVERLAPPED
    orchestrated: bool = True
    placement: Placement = field(default_factory=Placement)
    codec: str = "int8"
    codecs: Mapping[str, Codec] = field(default_factory=lambda: CODECS["accelerator"])
    predictor: str = "markov"
    capacity_bytes: Mapping[str, float] = field(default_factory=dict)  # instead of the hardware's
    waves: int = 8  # a step's layers are fetched and computed in so many groups
    staging: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.predictor not in PREDICTORS:
            raise ConfigError(f"no predictor {self.predictor!r}; known are {list(PREDICTORS)}")
        if self.codec not in self.codecs:
            raise ConfigError(f"no codec {self.codec!r}; known are {sorted(self.codecs)}")
        if self.waves < 1:
            raise ConfigError(f"waves must be >= 1, got {self.waves}")
        for tier in ("sram", *TIERS):
            if tier not in self.hardware.tiers:
                raise ConfigError(
                    f"hardware {self.hardware.name!r} lacks the tier {tier!r}; in a file,"
                    " base = h100 (or another built-in one) fills in what is not given"
                )
        for tier, size_bytes in self.capacity_bytes.items():
            if tier not in ("sram", *TIERS) or not size_bytes >= 0:
                raise ConfigError(
                    f"capacity {tier}={size_bytes} is not usable; tiers are {['sram', *TIERS]},"
                    " sizes are bytes >= 0"
                )

    def capacity_of(self, tier: str) -> float:
        """Return the bytes that blocks may take in a tier."""
        return self.capacity_bytes.get(tier, self.hardware.tiers[tier].capacity_bytes)
