"""What a decode run found: StepRecord, DecodeResult; every field has its unit in its name."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from flexkv.sim.decode.settings import TIERS, Settings
from flexkv.sim.decode.workload import Workload


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One decode step."""

    accesses: int
    staging_hits: int
    compute_s: float
    exposed_s: float
    hbm_read_bytes: float


@dataclass
class DecodeResult:
    """A whole run. `kv_read_bytes` by tier are reads of KV for any reason, weights apart."""

    workload: str
    mode: str
    pipeline: str
    hardware: str
    policy: str
    predictor: str
    codec: str
    context_tokens: float = 0.0  # mean
    steps: int = 0
    accesses: int = 0
    staging_hits: int = 0
    elapsed_s: float = 0.0
    compute_s: float = 0.0
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    busy_s: float = 0.0
    kv_read_bytes: dict[str, float] = field(default_factory=dict)
    kv_written_bytes: dict[str, float] = field(default_factory=dict)
    read_bytes_by_cause: dict[str, dict[str, float]] = field(default_factory=dict)
    written_bytes_by_cause: dict[str, dict[str, float]] = field(default_factory=dict)
    weight_read_bytes: float = 0.0
    moved_bytes: float = 0.0
    codec_saved_bytes: float = 0.0  # raw minus encoded, of all KV reads
    lossy_accesses: int = 0
    busy_s_by_server: dict[str, float] = field(default_factory=dict)
    peak_resident_bytes: dict[str, float] = field(default_factory=dict)
    evicted_blocks: int = 0
    encoded_blocks: int = 0
    promoted_blocks: int = 0
    prefetch: dict[str, float] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)

    @property
    def staging_hit_share(self) -> float:
        """Return hits of the staging buffers over all accesses, 0 to 1."""
        return self.staging_hits / self.accesses if self.accesses else 0.0

    @property
    def hbm_read_bytes(self) -> float:
        """Return what KV reads took out of HBM: demand, prefetch and migration."""
        return self.kv_read_bytes.get("hbm", 0.0)

    def as_json(self, *, steps: bool = False) -> dict[str, Any]:
        """Return all fields by name; `steps` adds the records of single steps, column by column."""
        found = asdict(self)
        del found["records"]
        found["staging_hit_share"] = self.staging_hit_share
        found["hbm_read_bytes"] = self.hbm_read_bytes
        if steps:
            found["records"] = {
                name: [getattr(record, name) for record in self.records]
                for name in StepRecord.__slots__
            }
        return found


def blank(workload: Workload, settings: Settings) -> DecodeResult:
    """Return the result of a run that has not begun."""
    return DecodeResult(
        workload=workload.name,
        mode="orchestrated" if settings.orchestrated else "baseline",
        pipeline=settings.pipeline.name,
        hardware=settings.hardware.name,
        policy=settings.placement.policy if settings.orchestrated else "lru",
        predictor=settings.predictor if settings.orchestrated else "none",
        codec=settings.codec if settings.orchestrated else "none",
        context_tokens=sum(workload.contexts) / len(workload.contexts),
        kv_read_bytes=dict.fromkeys(TIERS, 0.0),
    )
