"""The end of a run: close lets what is on its way arrive, balances the books, fills the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexkv.errors import ConservationError
from flexkv.sim import conservation
from flexkv.sim.decode.dma import SRAM
from flexkv.sim.decode.result import DecodeResult
from flexkv.sim.decode.settings import TIERS
from flexkv.sim.servers import overlap_s

if TYPE_CHECKING:
    from flexkv.sim.decode.run import Run


def close(run: Run) -> DecodeResult:
    """Let what is on its way arrive, balance the books, and return the result."""
    end_s, result, dma = run.clock.now_s, run.result, run.dma
    run.clock.run()
    run.residency.check()
    if dma.in_flight:
        raise ConservationError(f"{dma.in_flight} transfers never arrived")
    busy = [(a, min(b, end_s)) for a, b in dma.activity.intervals if a < end_s]
    result.busy_s = sum(b - a for a, b in busy)
    result.hidden_s = overlap_s(busy, run.computing)
    result.elapsed_s, result.steps = end_s, len(result.records)
    kinds = ("demand", "prefetch", "migration")
    reads, writes = dma.read_bytes, dma.written_bytes
    result.kv_read_bytes = {t: sum(reads[c][t] for c in kinds) for t in TIERS}
    result.kv_written_bytes = {t: writes["migration"][t] + writes["write"][t] for t in TIERS}
    result.read_bytes_by_cause = {c: dict(by) for c, by in reads.items() if by}
    result.written_bytes_by_cause = {c: dict(by) for c, by in writes.items() if by}
    result.weight_read_bytes = reads["weights"]["hbm"]
    result.codec_saved_bytes = run.raw_read_bytes - sum(
        reads[c][t] for c in ("demand", "prefetch") for t in TIERS
    )
    servers = {**dma.tiers, **dma.links}
    result.busy_s_by_server = {name: server.busy_s() for name, server in servers.items()}
    result.peak_resident_bytes = {
        SRAM: run.staging.capacity_blocks and run.staging.held * run.workload.block_bytes,
        **dict(zip(TIERS, run.residency.peak_bytes.tolist(), strict=True)),
    }
    run.score.wasted = run.staging.wasted + int(run.staging.unused.sum())
    result.prefetch = run.score.as_json()
    result.evicted_blocks = run.residency.evicted
    result.encoded_blocks = run.movement.encoded
    result.promoted_blocks = run.movement.promoted
    _balance(run)
    return result


def _balance(run: Run) -> None:
    """Hold times, bytes and residency against the laws; the sides are measured apart."""
    result, dma = run.result, run.dma
    served, booked = dma.served_bytes(), dma.booked_bytes()
    result.moved_bytes = sum(served.values())
    for tier, size_bytes in served.items():
        conservation.check_bytes({tier: booked[tier]}, size_bytes)
    conservation.check_run(
        exposed_s=result.exposed_s,
        hidden_s=result.hidden_s,
        busy_s=result.busy_s,
        by_tier=booked,
        moved_bytes=result.moved_bytes,
        resident=result.peak_resident_bytes,
        capacity={SRAM: run.settings.capacity_of(SRAM), **run.capacity},
        counts={
            "staging_hits": result.staging_hits,
            "misses": result.accesses - result.staging_hits,
            "codec_saved_bytes": result.codec_saved_bytes + 1e-6 * run.raw_read_bytes,
            "wasted": run.score.wasted,
        },
    )  # fmt: skip
    score = run.score
    kinds = {"in time": score.in_time, "late": score.late, "wasted": score.wasted}
    conservation.check_bytes(kinds, score.issued)
    conservation.check_times(result.compute_s, result.exposed_s, result.elapsed_s, "elapsed")
