"""The serving simulator against closed forms, its books against planted errors, plans by trial."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_traces import made_requests

from flexkv.coding import Coding
from flexkv.errors import ConfigError, ConservationError, InputError
from flexkv.model import DEVICE, DISK, HOST, KVSpec
from flexkv.sim.clock import VirtualClock
from flexkv.sim.compute import ComputeModel, shape
from flexkv.sim.profiles import hardware
from flexkv.sim.serving.coded import CodedLeg, coding_by
from flexkv.sim.serving.engine import Edge
from flexkv.sim.serving.legs import Cost, CostOf, Leg, Wire
from flexkv.sim.serving.prices import Prices
from flexkv.sim.serving.replay import Costs, check_config
from flexkv.sim.serving.serve import Report, serve
from flexkv.sim.serving.sizing import CodecRule, Setup, hardware_costs, plan, sweep
from flexkv.sim.serving.tasks import Task, Tasks
from flexkv.traces import Trace, TraceRequest

BLOCK, TOKENS = 4096, 16
COPY_S, READ_S, LATENCY_S = 0.010, 0.025, 0.002  # of a block; of a batch


def line(block_s: float, latency_s: float = LATENCY_S) -> CostOf:
    return lambda blocks: Cost(blocks * block_s, latency_s + blocks * block_s)


COSTS: dict[Edge, CostOf] = {
    (HOST, DEVICE): line(COPY_S),
    (DEVICE, HOST): line(COPY_S),
    (DISK, HOST): line(READ_S),
    (HOST, DISK): line(READ_S),
}


def per_token(new: int, past: int) -> float:
    """A millisecond per new token."""
    return new / 1e3


def request(at_s: float, *ids: int) -> TraceRequest:
    return TraceRequest(at_s * 1e3, None, len(ids) * TOKENS + 8, 5, np.array(ids, np.int64))


def trace_of(requests: list[TraceRequest]) -> Trace:
    accesses = sum(len(one.block_ids) for one in requests)
    return Trace("made", TOKENS, requests, accesses, accesses)


def run(requests: list[TraceRequest], *, chunk: int = 64, **more: Any) -> Report:
    sizes = {"host_blocks": 16, "disk_blocks": 64} | {
        name: more.pop(name) for name in ("host_blocks", "disk_blocks", "spill") if name in more
    }
    config = check_config(block_bytes=BLOCK, chunk_bytes=chunk * BLOCK, **sizes)
    spec = KVSpec.uniform(1, 1, BLOCK // (2 * TOKENS), "uint8", tokens_per_block=TOKENS)
    config = config.model_copy(update={"spec": spec, "tokens_per_block": TOKENS})
    names = [name for name in more if name in type(config).model_fields]
    config = config.model_copy(update={name: more.pop(name) for name in names})
    return serve(config, trace_of(requests), Costs(COSTS), per_token, **more)


def test_a_miss_takes_the_prefill_and_a_hit_the_copy_and_the_rest() -> None:
    cold, warm = run([request(0, *range(8)), request(100, *range(8))]).responses
    assert cold.ttft_s == pytest.approx(8 * 0.016 + 0.008)
    assert warm.by_tier == {"host": 8}
    assert warm.ttft_s == pytest.approx(LATENCY_S + 8 * COPY_S + 0.008)
    assert warm.exposed_s == pytest.approx(LATENCY_S + 8 * COPY_S)
    assert warm.hidden_s == 0


@pytest.mark.parametrize("chunk", [2, 4, 8])
@pytest.mark.parametrize("lane", ["a chunk", "everything"])
def test_chunks_from_disk_overlap_with_copies_as_in_a_flow_shop(chunk: int, lane: str) -> None:
    # the second prompt fills the host, so that the first is on disk only
    wide = [request(0, *range(8)), request(100, *range(100, 108)), request(200, *range(8))]
    in_flight = {} if lane == "a chunk" else {"device_bytes_in_flight": 1 << 28}
    last = run(wide, chunk=chunk, host_blocks=8, **in_flight).responses[-1]
    assert last.by_tier == {"host": 0, "disk": 8}
    # reads follow each other on the wire, with a latency each where a lane takes one chunk at a
    # time, with one in all where they overlap; the last chunk's copy comes behind its own read
    latencies = 8 // chunk if lane == "a chunk" else 1
    assert last.load_s == pytest.approx(
        8 * READ_S + latencies * LATENCY_S + LATENCY_S + chunk * COPY_S
    )


def test_a_load_beside_other_work_is_hidden_and_alone_it_is_exposed() -> None:
    requests = [request(0, *range(8)), request(100, *range(50, 90)), request(100, *range(8))]
    _, busy, other = run(requests, host_blocks=64).responses
    assert busy.prefill_s > other.load_s
    assert other.hidden_s == pytest.approx(LATENCY_S + 8 * COPY_S)
    assert other.exposed_s == 0
    assert other.queue_s == pytest.approx(busy.prefill_s - other.load_s)
    # with a second accelerator nobody waits, and the same load is seen
    _, _, alone = run(requests, host_blocks=64, accelerators=2).responses
    assert alone.exposed_s == pytest.approx(LATENCY_S + 8 * COPY_S)
    assert alone.queue_s == 0


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    host=st.integers(12, 30),
    disk=st.integers(0, 50),
    spill=st.sampled_from(["through", "on_evict", "never"]),
    speed=st.sampled_from([0.1, 1.0, 20.0]),
    accelerators=st.integers(1, 3),
    weighed=st.booleans(),
)
def test_the_books_balance_whatever_arrives(
    seed: int, host: int, disk: int, spill: str, speed: float, accelerators: int, weighed: bool
) -> None:
    report = run(
        made_requests(seed, 40),
        chunk=3,
        host_blocks=host,
        disk_blocks=disk,
        spill=spill,
        speed=speed,
        accelerators=accelerators,
        fetch_or_recompute=weighed,
    )  # holds its own books; the sums that a reader makes must agree too
    figures = report.as_json()
    assert sum(figures["hit_percent"].values()) <= 100 + 1e-9
    for one in report.responses:
        parts_s = one.exposed_s + one.hidden_s + one.queue_s + one.prefill_s
        assert parts_s == pytest.approx(one.ttft_s, abs=1e-6)
        assert sum(one.by_tier.values()) == one.matched
        assert one.matched + sum(one.declined.values()) <= one.blocks
        assert weighed or not one.declined
        assert min(one.exposed_s, one.hidden_s, one.queue_s, one.prefill_s) > -1e-9


def two_prompts_in_turn(rounds: int) -> list[TraceRequest]:
    """Prompts that push each other out of a host of 8 blocks, with nothing else under way."""
    prompts = (range(8), range(100, 108))
    return [request(100 * number, *prompts[number % 2]) for number in range(2 * rounds)]


def test_what_is_computed_sooner_than_read_is_computed_once_that_is_known() -> None:
    # a block takes 25 ms from disk and 16 ms to compute
    plain = run(two_prompts_in_turn(4), chunk=2, host_blocks=8)
    settings = {"fetch_or_recompute": True, "fetch_probe_s": 1e6}
    weighed = run(two_prompts_in_turn(4), chunk=2, host_blocks=8, **settings)
    first, last = weighed.responses[2], weighed.responses[-1]
    assert first.by_tier == {"host": 0, "disk": 8}, "nothing was known"
    assert (last.matched, last.declined) == (0, {"disk": 8})
    assert last.ttft_s == pytest.approx(8 * 0.016 + 0.008)
    assert plain.responses[-1].ttft_s > 8 * READ_S
    assert weighed.as_json()["declined_percent"]["disk"] > 0
    assert plain.as_json()["declined_percent"] == {"host": 0.0, "disk": 0.0}


def test_blocks_of_other_tokens_than_the_trace_has_are_not_weighed() -> None:
    config = check_config(block_bytes=BLOCK, host_blocks=8, fetch_or_recompute=True)
    with pytest.raises(InputError, match="1 tokens and one of the trace 16:"):
        serve(config, trace_of([request(0, 1)]), Costs(COSTS), per_token)


def test_where_reading_is_sooner_weighing_changes_nothing() -> None:
    settings: dict[str, Any] = {"chunk": 2, "host_blocks": 8, "recompute_weight": 2.0}
    plain, weighed = (
        run(two_prompts_in_turn(4), fetch_or_recompute=on, **settings) for on in (False, True)
    )
    assert plain.as_json() == weighed.as_json()


def test_a_prefill_model_says_where_attention_costs_as_much_as_the_rest() -> None:
    model = shape("llama-3.1-8b")
    position = int(model.crossover_tokens())
    attention = model.attention_flops(1, position - 1)
    assert attention == pytest.approx(2 * model.linear_weights(), rel=1e-3)


def test_a_leg_that_loses_bytes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    move = Leg.move

    def losing(leg: Leg, blocks: int) -> Any:
        leg.blocks -= 1
        return move(leg, blocks)

    monkeypatch.setattr(Leg, "move", losing)
    with pytest.raises(ConservationError, match="were moved"):
        run([request(0, *range(8))])


def test_a_trace_without_requests_is_refused() -> None:
    with pytest.raises(InputError, match="0 requests for 1 accelerators"):
        run([])


# sizes and prices


def setup() -> Setup:
    machine, tokens = hardware("h100"), 512
    compute = ComputeModel(
        shape("llama-3.1-8b"), machine.flops_per_s, machine.tiers["hbm"].read_bytes_per_s
    )
    requests = [
        TraceRequest(one.timestamp_ms, None, len(one.block_ids) * tokens + 3, 5, one.block_ids)
        for one in made_requests(3, 60)
    ]
    accesses = sum(len(one.block_ids) for one in requests)
    block_bytes = int(compute.model.kv_bytes_per_token()) * tokens
    trace = Trace("made", tokens, requests, accesses, accesses)
    return Setup(trace, compute, hardware_costs(machine, block_bytes))


def test_a_plan_is_the_smallest_disk_that_a_search_of_all_sizes_finds() -> None:
    made, host = setup(), 14
    trials = list(sweep(made, [host], range(33), lambda *_: None))
    ttft_s = [trial.report.ttft_s(80) for trial in trials]
    assert ttft_s[32] < ttft_s[0]
    limit_s = (ttft_s[0] + ttft_s[32]) / 2
    found = plan(made, limit_s, percent=80, host_blocks=[host], most_disk_blocks=32, steps=10)
    assert found.best is not None
    # the one below it is not within the limit: a border, and the first one if TTFT falls steadily
    border = found.best.disk_blocks
    assert ttft_s[border] <= limit_s < ttft_s[border - 1]
    costs = [trial.usd_per_hour for trial in found.pareto()]
    assert costs == sorted(costs)


def test_a_limit_that_nothing_keeps_has_no_plan() -> None:
    found = plan(setup(), 1e-9, host_blocks=[14], most_disk_blocks=32)
    assert found.best is None
    assert len(found.trials) == 2


def test_prices_add_up() -> None:
    prices = Prices(2.0, dram_usd_per_gb=10.0, disk_usd_per_gb=0.1, years=1.0)
    hourly = prices.usd_per_hour(3, 100e9, 5000e9)
    assert hourly == pytest.approx(3 * 2.0 + (1000 + 500) / 8766)
    spent = prices.usd_per_mtoken(
        2_000_000, 7200, accelerators=3, host_bytes=100e9, disk_bytes=5000e9
    )
    assert spent == pytest.approx(hourly * 2 / 2)


# a codec on the disk


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("disk_s", [0.1, 0.5])
def test_shares_of_a_batch_pass_disk_and_codec_one_after_the_other(
    reads: bool, disk_s: float
) -> None:
    """Five shares of two blocks, two of them together 0.4 s of the codec: a pipeline by hand."""
    coding = Coding(1000, 500, 5000.0, 5000.0, 1, share_bytes=2000)
    tasks = Tasks(VirtualClock())
    leg = CodedLeg(
        tasks,
        Wire(),
        lambda blocks: Cost(blocks * disk_s, blocks * disk_s),
        coding,
        Wire(),
        reads=reads,
    )
    over_s = []

    def move() -> Task:
        yield leg.move(10)
        over_s.append(tasks.clock.now_s)

    tasks.spawn(move())
    tasks.clock.run()
    slow, fast = max(2 * disk_s, 0.4), min(2 * disk_s, 0.4)
    assert over_s == [pytest.approx(5 * slow + fast)]
    assert leg.blocks == 10


def test_a_codec_makes_a_disk_hold_more_and_moves_less() -> None:
    """llama-3.1-8b in blocks of 512 tokens: with int8 1.9 times as many fit, in half the time."""
    plain, made = setup(), setup()
    coding = coding_by("int8", made.spec)
    costs = hardware_costs(hardware("h100"), made.block_bytes, coding)
    coded = replace(made, costs=costs, settings={"disk_codec": "int8"})
    before, after = plain.run(8, 20).report, coded.run(8, 20).report
    assert before.capacity_blocks["disk"] == 20
    assert after.capacity_blocks["disk"] == 20 * made.spec.stride_bytes // coding.stored_bytes
    assert after.capacity_blocks["disk"] >= 1.85 * 20
    plain_s, coded_s = (
        report.busy_s[DISK, HOST]
        / sum(size for (source, _), size in report.moved_bytes.items() if source == DISK)
        for report in (before, after)
    )
    assert plain_s / coded_s == pytest.approx(made.spec.block_bytes / coding.stored_bytes)


def test_the_verdict_on_a_codec_is_that_of_the_disk_that_is_simulated() -> None:
    """int8 halves what one read brings; on a disk a thousand times as fast the cores are slower."""
    made = setup()
    assert made.codec_rule() is None
    coding = Coding(made.block_bytes, made.block_bytes // 2, 1e9, 1e9)

    def rule(bytes_per_s: float) -> CodecRule:
        edge = line(coding.stored_bytes / bytes_per_s, latency_s=0)
        costs = Costs({(DISK, HOST): edge}, coding=coding)
        found = replace(made, costs=costs, settings={"disk_codec": "int8"}).codec_rule()
        assert found is not None
        return found

    slow, fast = rule(1e6), rule(1e12)
    assert slow.disk_bytes_per_s == pytest.approx(1e6)
    assert slow.pays
    assert slow.speedup == pytest.approx(2, rel=0.01)
    assert not fast.pays
    assert fast.speedup == pytest.approx(1e9 / 1e12, rel=0.01)
    even = rule(slow.break_even_bytes_per_s)
    assert slow.break_even_bytes_per_s == even.break_even_bytes_per_s
    assert even.speedup == pytest.approx(1)


def test_a_policy_that_learns_from_the_length_of_answers_is_told_it() -> None:
    """The same prompts: what is kept depends on how long their answers were."""
    prompts = made_requests(11, 600)
    answers = [0 if number % 3 else 4_000 for number in range(len(prompts))]
    hits = []
    for told in (answers, [5] * len(prompts)):
        requests = [
            replace(one, output_tokens=count) for one, count in zip(prompts, told, strict=True)
        ]
        found = run(requests, host_blocks=24, disk_blocks=0, host_policy="hazard")
        hits.append([one.matched for one in found.responses])
    assert hits[0] != hits[1]


def test_a_codec_without_rates_says_how_to_get_them() -> None:
    with pytest.raises(ConfigError, match="run `flexkv calibrate`"):
        coding_by("int8", setup().spec, {"int4": {}})
