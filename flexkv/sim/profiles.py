"""What hardware can do: TierProfile, HardwareProfile, hardware, names, read_profile, write_profile.

Seconds and bytes per second throughout. Every figure carries its public source; `assumed` marks
what no public page states, and `flexkv calibrate` replaces figures by measured ones in the same
file format: TOML or JSON with the field names below.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flexkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TierProfile:
    """One tier or link: requests cost `latency_s` plus bytes over bytes per second.

    `channels` share the bandwidth evenly; up to `queue_depth` requests are in flight. Urgent work
    overtakes at borders of `chunk_bytes`. Neighbouring requests merge up to `coalesce_bytes`
    (0: never). `behind` names the link that all its bytes pass.
    """

    name: str
    capacity_bytes: float
    latency_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    channels: int = 1
    queue_depth: int = 64
    chunk_bytes: int = 1 << 20
    coalesce_bytes: int = 0
    behind: str | None = None
    source: str = "not stated"

    def __post_init__(self) -> None:
        for name in ("capacity_bytes", "read_bytes_per_s", "write_bytes_per_s"):
            value = getattr(self, name)
            if not value > 0 or math.isnan(value):
                raise ConfigError(f"{name} of {self.name!r} must be > 0, got {value!r}")
        if not self.latency_s >= 0:
            raise ConfigError(f"latency_s of {self.name!r} must be >= 0, got {self.latency_s!r}")
        for name in ("channels", "queue_depth", "chunk_bytes"):
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= 1):
                raise ConfigError(f"{name} of {self.name!r} must be an integer >= 1, got {value!r}")


@dataclass(frozen=True)
class HardwareProfile:
    """A machine: its tiers, the links between them, and what its accelerator computes."""

    name: str
    tiers: Mapping[str, TierProfile]
    links: Mapping[str, TierProfile] = field(default_factory=dict)
    flops_per_s: float = 0.0  # dense, 16 bit
    source: str = "not stated"

    def __post_init__(self) -> None:
        for tier in self.tiers.values():
            if tier.behind is not None and tier.behind not in self.links:
                raise ConfigError(
                    f"tier {tier.name!r} of {self.name!r} is behind {tier.behind!r}; its links are"
                    f" {sorted(self.links)}"
                )

    def with_tiers(self, *tiers: TierProfile) -> HardwareProfile:
        """Return this machine with some tiers replaced or added."""
        return replace(self, tiers={**self.tiers, **{tier.name: tier for tier in tiers}})

    def scaled(self, name: str, factor: float) -> HardwareProfile:
        """Return this machine with the bytes per second of one tier or link times `factor`."""
        group = self.tiers if name in self.tiers else self.links
        if name not in group:
            raise ConfigError(
                f"{self.name!r} has no tier or link {name!r}; it has"
                f" {sorted([*self.tiers, *self.links])}"
            )
        old = group[name]
        new = replace(
            old,
            read_bytes_per_s=old.read_bytes_per_s * factor,
            write_bytes_per_s=old.write_bytes_per_s * factor,
        )
        which = "tiers" if group is self.tiers else "links"
        changed: dict[str, Any] = {which: {**group, name: new}}
        return replace(self, **changed)


GIB = float(1 << 30)
PCIE5 = TierProfile(
    "pcie", math.inf, 0.5e-6, 63.0e9, 63.0e9, queue_depth=256,
    source="PCI-SIG 5.0: 32 GT/s x 16 lanes x 128/130, per direction; 0.5 us one way is assumed",
)  # fmt: skip
CXL31 = TierProfile(
    "cxl", 1024 * GIB, 0.4e-6, 118.0e9, 118.0e9, queue_depth=256, behind="pcie",
    source="CXL 3.1 on PCIe 6: 64 GT/s x 16 lanes x 236/256 flit; latency assumed: a pool behind"
    " one switch, from Pond (arXiv 2203.00241) and Demystifying CXL (arXiv 2303.15375)",
)  # fmt: skip
DRAM = TierProfile(
    "dram", 512 * GIB, 0.11e-6, 307.2e9, 307.2e9, channels=8, queue_depth=512, behind="pcie",
    source="8 x DDR5-4800 (JEDEC JESD79-5: 38.4e9 B/s a channel); 110 ns loaded latency is assumed",
)  # fmt: skip
NVME4 = TierProfile(
    "ssd", 3.84e12, 80e-6, 6.9e9, 4.1e9, channels=8, queue_depth=256, coalesce_bytes=1 << 20,
    chunk_bytes=1 << 17, behind="pcie",
    source="Samsung PM9A3 3.84 TB product brief: 6,900/4,100 MB/s; 80 us typical read is assumed",
)  # fmt: skip
NVME5 = TierProfile(
    "ssd", 7.68e12, 60e-6, 14.0e9, 10.0e9, channels=8, queue_depth=256, coalesce_bytes=1 << 20,
    chunk_bytes=1 << 17, behind="pcie",
    source="Micron 9550 PRO product brief: 14,000/10,000 MB/s; 60 us typical read is assumed",
)  # fmt: skip


def network(gigabits: int) -> TierProfile:
    """Return a remote store behind a `gigabits`-per-second Ethernet or InfiniBand port."""
    rate = gigabits * 1e9 / 8
    return TierProfile(
        "network", float(1 << 50), 5e-6, rate, rate, queue_depth=256, coalesce_bytes=1 << 20,
        behind="pcie",
        source=f"line rate of {gigabits} Gbit/s (IEEE 802.3), bytes; 5 us for an RDMA read through"
        " one switch is assumed",
    )  # fmt: skip


def _accelerator(
    name: str, hbm_bytes: float, hbm_rate: float, sram: TierProfile, flops: float, source: str
) -> HardwareProfile:
    hbm = TierProfile(
        "hbm", hbm_bytes, 0.3e-6, hbm_rate, hbm_rate, queue_depth=1024, chunk_bytes=1 << 24,
        source=source,
    )  # fmt: skip
    tiers = (sram, hbm, CXL31, DRAM, NVME5, network(400))
    return HardwareProfile(
        name, {tier.name: tier for tier in tiers}, {"pcie": PCIE5}, flops, source
    )


def _sram(size_bytes: float, rate: float, source: str) -> TierProfile:
    return TierProfile("sram", size_bytes, 0.15e-6, rate, rate, queue_depth=1024, source=source)


_HOPPER_L2 = _sram(
    50e6, 5.5e12,
    "50 MB L2 (NVIDIA H100 architecture white paper); 5.5e12 B/s and 150 ns: Chips and Cheese,"
    " 'Nvidia's H100: Funny L2, and Tons of Bandwidth' (2023), recalled",
)  # fmt: skip
_PUBLIC = (
    _accelerator("h100", 80e9, 3.35e12, _HOPPER_L2, 989.4e12,
                 "NVIDIA H100 SXM data sheet: 80 GB, 3.35 TB/s, 989.4 TFLOPS bf16 dense; 0.3 us:"
                 " about 480 cycles in arXiv 2402.13499, recalled"),
    _accelerator("h200", 141e9, 4.8e12, _HOPPER_L2, 989.4e12,
                 "NVIDIA H200 SXM data sheet: 141 GB, 4.8 TB/s, 989 TFLOPS; latency as H100's"),
    _accelerator("b200", 180e9, 7.7e12, _sram(126e6, 11e12, "L2 of two dies, recalled; bytes per"
                 " second assumed as twice H100's"), 2250e12,
                 "NVIDIA HGX B200 data sheet: 180 GB, 7.7 TB/s, 2.25 PFLOPS bf16 dense; latency as"
                 " H100's is assumed"),
    _accelerator("mi300x", 192e9, 5.3e12, _sram(256e6, 17.2e12, "AMD CDNA 3 white paper: 256 MB"
                 " Infinity Cache, 17.2 TB/s peak; latency as H100's is assumed"), 1307.4e12,
                 "AMD Instinct MI300X data sheet: 192 GB, 5.3 TB/s, 1,307.4 TFLOPS bf16 dense;"
                 " latency as H100's is assumed"),
)  # fmt: skip
_PROTOTYPE_SOURCE = (
    "the default configuration of the public prototype KVFabric (formerly KVFlow), read as bytes"
    " per second; four tiers, no link in common"
)
PROTOTYPE = HardwareProfile(
    "prototype",
    {
        name: TierProfile(
            name, capacity_bytes, latency_s, rate, rate, queue_depth=256, source=_PROTOTYPE_SOURCE
        )
        for name, capacity_bytes, latency_s, rate in (
            ("sram", 0.5 * GIB, 25e-9, 20e12),
            ("hbm", 8 * GIB, 300e-9, 3e12),
            ("cxl", 24 * GIB, 900e-9, 300e9),
            ("dram", 64 * GIB, 1800e-9, 120e9),
        )
    },
    source=_PROTOTYPE_SOURCE,
)
HARDWARE: dict[str, HardwareProfile] = {p.name: p for p in (*_PUBLIC, PROTOTYPE)}
VARIANTS = {
    "nvme4": NVME4, "nvme5": NVME5,
    "net100": network(100), "net200": network(200), "net400": network(400),
}  # fmt: skip


def names() -> list[str]:
    """Return what `hardware` knows without a file."""
    return sorted(HARDWARE)


def hardware(name: str) -> HardwareProfile:
    """Return a built-in profile or that of a file; `h100+nvme4+net100` replaces tiers."""
    base, *extras = name.split("+")
    if base.endswith((".toml", ".json")):
        profile = read_profile(Path(base))
    elif base.lower() in HARDWARE:
        profile = HARDWARE[base.lower()]
    else:
        raise ConfigError(f"no hardware {base!r}; known are {names()} and .toml or .json files")
    for extra in extras:
        if extra not in VARIANTS:
            raise ConfigError(f"no variant {extra!r} of a tier; known are {sorted(VARIANTS)}")
        profile = profile.with_tiers(VARIANTS[extra])
    return profile


def _tiers(path: Path, group: str, entries: Any) -> dict[str, TierProfile]:
    if not isinstance(entries, Mapping):
        raise ConfigError(f"{path}: [{group}] must be a table of tiers by name")
    known = {f.name for f in dataclasses.fields(TierProfile)}
    found = {}
    for name, entry in entries.items():
        unknown = set(entry) - known
        if unknown:
            raise ConfigError(
                f"{path}: unknown field {sorted(unknown)} of {name!r}; known are {sorted(known)}"
            )
        try:
            found[name] = TierProfile(**{"name": name, **entry})
        except TypeError as error:
            raise ConfigError(f"{path}: {group}.{name}: {error}") from None
    return found


def read_profile(path: Path) -> HardwareProfile:
    """Read a machine from a TOML or JSON file; what it leaves out comes from its `base`."""
    try:
        text = path.read_text()
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the hardware profile {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(
            f"{path} is neither TOML nor JSON by its name's ending: {error}"
        ) from None
    base = hardware(data["base"]) if "base" in data else HardwareProfile(path.stem, {})
    return HardwareProfile(
        data.get("name", path.stem),
        {**base.tiers, **_tiers(path, "tiers", data.get("tiers", {}))},
        {**base.links, **_tiers(path, "links", data.get("links", {}))},
        float(data.get("flops_per_s", base.flops_per_s)),
        data.get("source", base.source),
    )


def as_json(profile: HardwareProfile) -> dict[str, Any]:
    """Return what `read_profile` reads."""

    def table(tiers: Iterable[TierProfile]) -> dict[str, Any]:
        return {tier.name: dataclasses.asdict(tier) for tier in tiers}

    return {
        "name": profile.name,
        "flops_per_s": profile.flops_per_s,
        "source": profile.source,
        "tiers": table(profile.tiers.values()),
        "links": table(profile.links.values()),
    }


def write_profile(profile: HardwareProfile, path: Path) -> None:
    """Write a machine as JSON, for `read_profile` and for people."""
    path.write_text(json.dumps(as_json(profile), indent=2) + "\n")
