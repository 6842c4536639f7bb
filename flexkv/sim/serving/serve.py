"""Many requests at once: arrivals by the trace, loads, prefill, time to first token.

`serve` (a trace -> `Report`) - `Compute` (accelerators that prefill, first come, first served) -
`Response` (one request). A request matches and loads when it arrives, waits for an accelerator when
its blocks are there, computes the rest of its prompt (first token), decodes, and is put at the end.

A load is *exposed* while an accelerator stands idle, since its request could compute there, and
*hidden* while all are busy: TTFT = exposed + hidden + queue + prefill. Decoding takes time and no
accelerator, as where prefill and decode are apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flexkv.config import FlexKVConfig
from flexkv.errors import ConservationError, InputError
from flexkv.model import DEVICE, HOST, KeyArray
from flexkv.sim.clock import VirtualClock
from flexkv.sim.conservation import check_run
from flexkv.sim.serving.cache import Moved, VirtualCache
from flexkv.sim.serving.engine import Edge
from flexkv.sim.serving.replay import Costs
from flexkv.sim.serving.tasks import Happening, Task, Tasks
from flexkv.traces import Trace, TraceRequest, block_keys

Prefill = Callable[[int, int], float]  # new tokens, tokens that are there -> seconds
Progress = Callable[[int, int], None]
_KEYS_AT_ONCE = 256  # requests


class Compute:
    """Accelerators; `idle_s` and `busy_s` are the times with and without a free one so far."""

    def __init__(self, tasks: Tasks, accelerators: int) -> None:
        self._tasks, self._free = tasks, accelerators
        self.accelerators = accelerators
        self._waiting: deque[Happening] = deque()
        self._since_s = 0.0
        self._idle_s = self._busy_s = 0.0

    def _note(self) -> None:
        now_s = self._tasks.clock.now_s
        if self._free:
            self._idle_s += now_s - self._since_s
        else:
            self._busy_s += now_s - self._since_s
        self._since_s = now_s

    def times(self) -> tuple[float, float]:
        """Return (idle_s, busy_s) up to now."""
        self._note()
        return self._idle_s, self._busy_s

    def take(self) -> Happening | None:
        """Take an accelerator at once (None), or return the moment when it is ours."""
        self._note()
        if self._free:
            self._free -= 1
            return None
        turn = Happening()
        self._waiting.append(turn)
        return turn

    def give(self) -> None:
        """Hand the accelerator to who waits longest."""
        self._note()
        if self._waiting:
            self._tasks.happen(self._waiting.popleft())
        else:
            self._free += 1


@dataclass(slots=True)
class Response:
    """One request; times in seconds of the virtual clock."""

    number: int
    arrival_s: float
    blocks: int
    matched: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    declined: dict[str, int] = field(default_factory=dict)  # computed, because that is sooner
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    load_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    refused: bool = False


@dataclass(frozen=True)
class Report:
    """What a run came to; `ttft_s` and the rest by request are in `responses`."""

    responses: Sequence[Response]
    capacity_blocks: Mapping[str, int]
    evicted_blocks: Mapping[str, int]
    moved_bytes: Mapping[Edge, int]
    dropped_blocks: int
    busy_s: Mapping[Edge, float]
    elapsed_s: float
    input_tokens: int
    output_tokens: int

    def ttft_s(self, percent: float) -> float:
        """Return a percentile of the times to first token."""
        return float(np.percentile([one.ttft_s for one in self.responses], percent))

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        blocks = sum(one.blocks for one in self.responses)
        tiers = list(self.capacity_blocks)

        def percent(counts: str) -> dict[str, float]:
            sums = {t: sum(getattr(one, counts).get(t, 0) for one in self.responses) for t in tiers}
            return {tier: 100 * count / blocks if blocks else 0.0 for tier, count in sums.items()}

        return {
            "requests": len(self.responses),
            "accesses": blocks,
            "capacity_blocks": dict(self.capacity_blocks),
            "hit_percent": percent("by_tier"),
            "declined_percent": percent("declined"),
            "ttft_ms": {f"p{p}": self.ttft_s(p) * 1e3 for p in (50, 95, 99)},
            "ttft_mean_ms": {
                part: float(np.mean([getattr(one, f"{part}_s") for one in self.responses])) * 1e3
                for part in ("ttft", "exposed", "hidden", "queue", "prefill")
            },
            "evicted_blocks": dict(self.evicted_blocks),
            "moved_bytes": {"->".join(edge): size for edge, size in self.moved_bytes.items()},
            "busy_s": {"->".join(edge): busy for edge, busy in self.busy_s.items()},
            "dropped_blocks": self.dropped_blocks,
            "refused_puts": sum(one.refused for one in self.responses),
            "elapsed_s": self.elapsed_s,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
        }


def serve(
    config: FlexKVConfig,
    trace: Trace,
    costs: Costs,
    prefill: Prefill,
    *,
    accelerators: int = 1,
    decode_s_per_token: float = 0.0,
    speed: float = 1.0,
    progress: Progress = lambda *_: None,
) -> Report:
    """Serve a trace; `speed` 2 makes it arrive in half the time.

    Raises:
        InputError: there are no requests, or a number is out of range.
        ConservationError: the books of the run do not balance.
    """
    if not trace.requests or accelerators < 1 or not speed > 0 or decode_s_per_token < 0:
        raise InputError(
            f"{len(trace.requests)} requests for {accelerators} accelerators at speed {speed}: all "
            "must be more than 0"
        )
    size = trace.tokens_per_block
    if config.fetch_or_recompute and config.tokens_per_block != size:
        raise InputError(
            f"a block of the cache has {config.tokens_per_block} tokens and one of the trace "
            f"{size}: fetch_or_recompute needs the same number"
        )
    return _Serving(config, trace, costs, prefill, accelerators, decode_s_per_token).run(
        speed, progress
    )


def _keys(requests: Sequence[TraceRequest]) -> Iterator[KeyArray]:
    """Yield the keys of each request; made for many at once, which costs less."""
    for start in range(0, len(requests), _KEYS_AT_ONCE):
        ids = [request.block_ids for request in requests[start : start + _KEYS_AT_ONCE]]
        ends = np.cumsum([len(one) for one in ids])
        yield from np.split(block_keys(np.concatenate(ids)), ends)[:-1]


class _Serving:
    """A run of `serve`."""

    def __init__(
        self,
        config: FlexKVConfig,
        trace: Trace,
        costs: Costs,
        prefill: Prefill,
        accelerators: int,
        decode_s_per_token: float,
    ) -> None:
        self._trace, self._costs, self._prefill = trace, costs, prefill
        self._decode_s = decode_s_per_token
        self._tasks = Tasks(VirtualClock())
        self._legs = costs.legs(self._tasks)
        self._cache = VirtualCache(config, self._tasks, self._legs)
        self._compute = Compute(self._tasks, accelerators)
        self._own: dict[Edge, int] = {}  # bytes of gets and puts

    def run(self, speed: float, progress: Progress) -> Report:
        """Let the requests arrive, and all work end."""
        clock, requests = self._tasks.clock, self._trace.requests
        first_ms = requests[0].timestamp_ms
        responses = []
        for number, (request, keys) in enumerate(zip(requests, _keys(requests), strict=True)):
            arrival_s = (request.timestamp_ms - first_ms) / 1e3 / speed
            clock.run(until_s=arrival_s)
            response = Response(number, arrival_s, len(request.block_ids))
            responses.append(response)
            self._tasks.spawn(self._request(request, keys, response))
            if number % 256 == 0:
                progress(number, len(requests))
        clock.run()
        progress(len(requests), len(requests))
        self._check(responses)
        cache = self._cache
        return Report(
            responses,
            {tier.name: tier.capacity for tier in cache.ledger.tiers.values()},
            cache.evicted(),
            dict(cache.moved_bytes),
            cache.dropped_blocks,
            {edge: leg.busy_s for edge, leg in self._legs.items()},
            clock.now_s,
            sum(request.input_tokens for request in requests),
            sum(request.output_tokens for request in requests),
        )

    def _request(self, request: TraceRequest, keys: KeyArray, response: Response) -> Task:
        clock, got, put = self._tasks.clock, Moved(), Moved()
        idle_s, busy_s = self._compute.times()
        yield from self._cache.get(keys, got)
        near = got.by_tier.get(HOST, 0)
        if got.matched:
            yield self._tasks.after(self._costs.get_s(near, got.matched - near))
        response.matched, response.by_tier = got.matched, got.by_tier
        response.declined = got.declined
        idle_end_s, busy_end_s = self._compute.times()
        response.exposed_s, response.hidden_s = idle_end_s - idle_s, busy_end_s - busy_s
        response.load_s = clock.now_s - response.arrival_s
        turn = self._compute.take()
        if turn is not None:
            yield turn
        response.queue_s = clock.now_s - response.arrival_s - response.load_s
        past = min(got.matched * self._trace.tokens_per_block, max(0, request.input_tokens - 1))
        new = request.input_tokens - past
        response.prefill_s = self._prefill(new, past)
        yield self._tasks.after(response.prefill_s)
        self._cache.computed(new, past, response.prefill_s, 1 / self._compute.accelerators)
        response.ttft_s = clock.now_s - response.arrival_s
        self._compute.give()
        if self._decode_s:
            yield self._tasks.after(self._decode_s * request.output_tokens)
        yield from self._cache.put(keys, put, request.output_tokens)
        response.refused = put.refused
        for moved in (got.moved_bytes, put.moved_bytes):
            for edge, size in moved.items():
                self._own[edge] = self._own.get(edge, 0) + size

    def _check(self, responses: Sequence[Response]) -> None:
        """Hold the run's books: times, bytes, residency, signs.

        Raises:
            ConservationError: they do not balance.
        """
        cache = self._cache
        cache.check_idle()
        for one in responses:
            parts_s = one.exposed_s + one.hidden_s + one.queue_s + one.prefill_s
            if abs(parts_s - one.ttft_s) > 1e-6 * max(1.0, one.arrival_s):
                raise ConservationError(
                    f"request {one.number}: its parts take {parts_s} s, its TTFT is {one.ttft_s} s"
                )
        block_bytes = cache.spec.block_bytes
        by_tier = {"->".join(edge): float(size) for edge, size in cache.moved_bytes.items()}
        staged = sum(  # those blocks pass two legs
            size
            for (source, target), size in cache.moved_bytes.items()
            if source != HOST and target == DEVICE
        )
        legs_bytes = sum(leg.blocks for leg in self._legs.values()) * block_bytes
        check_run(
            exposed_s=sum(one.exposed_s for one in responses),
            hidden_s=sum(one.hidden_s for one in responses),
            busy_s=sum(one.load_s for one in responses),
            by_tier=by_tier,
            moved_bytes=legs_bytes - staged,
            resident={name: float(held) for name, held in cache.resident().items()},
            capacity={t.name: float(t.capacity) for t in cache.ledger.tiers.values()},
            counts={
                "dropped_blocks": cache.dropped_blocks,
                **{f"requests' own {'->'.join(edge)}": size for edge, size in self._own.items()},
                **{
                    f"in the background {'->'.join(edge)}": size - self._own.get(edge, 0)
                    for edge, size in cache.moved_bytes.items()
                },
            },
        )
