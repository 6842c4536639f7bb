"""D12: counters are true, do not move by being read, and survive stopping and starting."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from rig import SPEC, open_rig, prompt

from flexkv.telemetry import expose


def scrape(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of the end point; fails when a series appears twice."""
    from prometheus_client import generate_latest

    samples = [
        ((sample.name, tuple(sorted(sample.labels.items()))), sample.value)
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    ]
    twice = [series for series, count in Counter(name for name, _ in samples).items() if count > 1]
    assert not twice
    return dict(samples)


def expected(times: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Counts after `times` runs of the scenario."""
    once = {
        ("flexkv_stored_blocks_total", ()): 12,
        ("flexkv_queried_blocks_total", ()): 8,
        ("flexkv_hit_blocks_total", ()): 4,
        ("flexkv_loaded_blocks_total", ()): 4,
        ("flexkv_tier_hit_blocks_total", (("tier", "disk"),)): 4,
        ("flexkv_transfers_total", (("kind", "put"), ("outcome", "ok"))): 3,
        ("flexkv_transfers_total", (("kind", "get"), ("outcome", "ok"))): 2,
        ("flexkv_evicted_blocks_total", (("tier", "host"),)): 8,
        ("flexkv_transfer_blocks_total", (("source", "device"), ("target", "host"))): 12,
        ("flexkv_transfer_blocks_total", (("source", "host"), ("target", "disk"))): 12,
        ("flexkv_transfer_blocks_total", (("source", "disk"), ("target", "host"))): 4,
        ("flexkv_transfer_blocks_total", (("source", "host"), ("target", "device"))): 4,
        ("flexkv_refused_puts_total", ()): 0,
        ("flexkv_timed_out_transfers_total", ()): 0,
    }
    once[("flexkv_transfer_bytes_total", (("source", "device"), ("target", "host")))] = (
        12 * SPEC.block_bytes
    )
    del once[("flexkv_timed_out_transfers_total", ())]
    return {series: times * count for series, count in once.items()}


async def test_d12_counts_are_true_and_stand_still(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    for life in (1, 2, 3):
        async with open_rig(tmp_path / str(life)) as rig:
            expose(registry, rig.kv.telemetry)
            for name in range(3):
                await rig.put(prompt(name, 4))
            assert (await rig.get(prompt(0, 4))).loaded == 16
            assert (await rig.get(prompt(7, 4))).loaded == 0
            await rig.kv.flush()
            scrapes = [scrape(registry) for _ in range(5)]
            assert all(one == scrapes[0] for one in scrapes)
            shown = {series: scrapes[0].get(series) for series in expected(life)}
            assert shown == expected(life)
            gauges = {
                ("flexkv_tier_capacity_blocks", (("tier", "host"),)): 8,
                ("flexkv_tier_free_blocks", (("tier", "host"),)): 0,
                ("flexkv_tier_capacity_blocks", (("tier", "disk"),)): 32,
                ("flexkv_tier_free_blocks", (("tier", "disk"),)): 20,
                ("flexkv_pinned_blocks", ()): 0,
                ("flexkv_index_blocks", ()): 12,
                ("flexkv_transfers_in_flight", (("kind", "get"),)): 0,
            }
            assert {series: scrapes[0].get(series) for series in gauges} == gauges
        after = scrape(registry)
        assert {series: after.get(series) for series in expected(life)} == expected(life)
        lost = {name for name, _ in scrapes[0] if name.endswith("_total")} - {n for n, _ in after}
        assert not lost, "a counter vanished with its manager"


async def test_d12_two_managers_at_once_are_added_up(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    async with open_rig(tmp_path / "a") as first, open_rig(tmp_path / "b") as second:
        for rig in (first, second):
            expose(registry, rig.kv.telemetry)
            expose(registry, rig.kv.telemetry)
            await rig.put(prompt(1, 3))
        assert scrape(registry)[("flexkv_stored_blocks_total", ())] == 6
    assert scrape(registry)[("flexkv_stored_blocks_total", ())] == 6


@pytest.mark.parametrize("outcome", ["cancelled", "refused"])
async def test_d12_what_did_not_happen_is_not_counted_as_done(tmp_path: Path, outcome: str) -> None:
    registry = CollectorRegistry()
    async with open_rig(tmp_path) as rig:
        expose(registry, rig.kv.telemetry)
        if outcome == "refused":
            with pytest.raises(Exception, match="host slots"):
                await rig.put(prompt(1, 9))
            assert scrape(registry)[("flexkv_refused_puts_total", ())] == 1
        else:
            await rig.put(prompt(1, 4))
            await rig.push_out()
            gate = rig.faults().hold("read")
            transfer = rig.kv.prefetch_async(prompt(1, 4))
            await gate.reached.wait()
            transfer.cancel()
            gate.open()
            await transfer
            series = ("flexkv_transfers_total", (("kind", "prefetch"), ("outcome", "cancelled")))
            assert scrape(registry)[series] == 1
        assert scrape(registry)[("flexkv_loaded_blocks_total", ())] == 0
