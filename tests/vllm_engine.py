"""A small engine that calls a KV connector as vLLM's scheduler and model runner do: `FakeEngine`.

`add`, `abort`, `step`, `reset` - `settle` (step until nothing is left). It has vLLM's prefix cache,
chunked prefill, preemption, asynchronous scheduling (`depth=2`), recovery from failed loads and the
call orders of its versions, over KV memory whose bytes can be checked. At every step attention
"reads" all tokens of a request before and in this step: bytes that are not its own are an error,
unless the connector says in the same step that their block failed to load.
"""

from __future__ import annotations

import pickle
import random
import uuid
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import vllm_modules
from vllm_memory import HEAD_SIZE, HEADS, LAYERS, Chain, Memory

WAITING, REMOTE, RUNNING, PREEMPTED = "WAITING", "WAITING_FOR_REMOTE_KVS", "RUNNING", "PREEMPTED"
SENT_WITHIN_STEPS = 20_000


class Request:
    """A request as connectors see it."""

    def __init__(self, name: str, prompt: list[int], answer: int, salt: str | None) -> None:
        self.request_id, self.prompt_token_ids = name, list(prompt)
        self.num_prompt_tokens, self.max_tokens = len(prompt), answer
        self.all_token_ids = list(prompt)
        self.cache_salt, self.lora_request, self.mm_features = salt, None, []
        self.prompt_embeds = None
        self.kv_transfer_params: dict[str, Any] | None = None
        self.skip_reading_prefix_cache = False
        self.num_computed_tokens = self.num_preemptions = 0
        self.status = WAITING
        # the scheduler's own
        self.chain = Chain(prompt, repr(salt))
        self.blocks: list[int] = []
        self.told = self.cached = self.placeholders = self.in_flight = self.stale = self.fence = 0
        self.drop_stale = self.unfinished_prefill = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        return self.status.startswith("FINISHED")

    def is_finished(self) -> bool:
        return self.finished

    def get_finished_reason(self) -> Any:
        return SimpleNamespace(name=self.status.split("_")[1]) if self.finished else None


@dataclass
class Output:
    """A SchedulerOutput; `work` and `fresh` are for the fake workers."""

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: list[Any]
    scheduled_cached_reqs: Any
    finished_req_ids: set[str]
    preempted_req_ids: set[str]
    has_sync_kv_loads: bool
    work: list[tuple[Request, list[int], int, int, bool]]
    fresh: list[int]
    kv_connector_block_state: Any = None
    kv_connector_metadata: Any = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass
class ConnectorOutput:
    """A KVConnectorOutput."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    failed_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    kv_connector_stats: Any = None
    kv_connector_worker_meta: Any = None


class FullAttentionSpec:
    """Named like vLLM's."""

    def __init__(self, size: int) -> None:
        self.block_size, self.num_kv_heads, self.head_size = size, HEADS, HEAD_SIZE
        self.dtype, self.sliding_window = "float32", None


class BlockPool:
    """Device blocks: which are free, what each one holds, and what a prefix can be found in."""

    def __init__(self, blocks: int) -> None:
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self.users = [0] * blocks
        self.found: dict[int, int] = {}  # number of a prefix -> block
        self.holds: dict[int, int] = {}  # and back
        self.fresh: list[int] = []

    def take(self) -> int:
        block, _ = self.free.popitem(last=False)
        self.forget(block)
        self.users[block] = 1
        self.fresh.append(block)
        return block

    def share(self, block: int) -> None:
        self.free.pop(block, None)
        self.users[block] += 1

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.users[block] -= 1
            assert self.users[block] >= 0, "a block was freed twice"
            if not self.users[block]:
                self.free[block] = None

    def forget(self, block: int) -> None:
        prefix = self.holds.pop(block, None)
        if prefix is not None:
            del self.found[prefix]

    def evict_blocks(self, block_ids: set[int]) -> None:
        for block in block_ids:
            self.forget(block)

    def reset(self) -> bool:
        if any(self.users):
            return False
        self.found.clear()
        self.holds.clear()
        return True


class FakeEngine:
    """One engine with its connectors: the scheduler's, and one per rank."""

    def __init__(
        self,
        connector: type,
        dice: random.Random,
        *,
        minor: int = 32,
        ranks: int = 1,
        blocks: int = 64,
        size: int = 4,
        depth: int = 1,
        budget: int = 64,
        most_running: int = 8,
        device: str = "cpu",
        defer_frees: bool = False,
        **settings: Any,
    ) -> None:
        self.dice, self.minor, self.size, self.depth, self.budget = dice, minor, size, depth, budget
        self.most_running, self.defer_frees = most_running, defer_frees
        # saves of running requests may read their blocks until the step after they lost them
        self.poisons = not settings.get("save_every_tokens")
        self.pool = BlockPool(blocks)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.holding: deque[Request] = deque()  # waiting with blocks
        self.running: list[Request] = []
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.finished_ids: set[str] = set()
        self.preempted_ids: set[str] = set()
        self.queue: deque[list[Any]] = deque()
        self.aborts: list[str] = []
        self.deferred: deque[tuple[int, list[int]]] = deque()
        self.scheduled_steps = self.processed_steps = 0
        self.counts = {"preemptions": 0, "loaded": 0, "failed": 0, "steps": 0, "recovered": 0}
        self._still_sending: dict[str, int] = {}
        self._still_receiving: dict[str, int] = {}
        config = self._config(ranks, blocks, settings)
        kv = SimpleNamespace(
            num_blocks=blocks,
            kv_cache_groups=[
                SimpleNamespace(
                    layer_names=[f"model.layers.{i}.attn" for i in range(LAYERS)],
                    kv_cache_spec=FullAttentionSpec(size),
                )
            ],
        )
        role = vllm_modules.KVConnectorRole
        self.memories = [Memory(rank, blocks, size, minor, device) for rank in range(ranks)]
        self.workers = []
        for rank, memory in enumerate(self.memories):
            worker = connector(config, role.WORKER, kv)
            self.workers.append(worker)
            self._become(rank)
            worker.register_kv_caches(memory.tensors)
        self.connector = connector(config, role.SCHEDULER, kv)
        if minor >= 28:
            self.connector.bind_gpu_block_pool(self.pool)

    def _config(self, ranks: int, blocks: int, settings: dict[str, Any]) -> Any:
        return SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_connector_extra_config=settings,
                engine_id=uuid.uuid4().hex,
                kv_load_failure_policy="fail",
            ),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=ranks,
                pipeline_parallel_size=1,
                data_parallel_size=1,
                data_parallel_rank=0,
            ),
            model_config=SimpleNamespace(
                model="fake",
                revision=None,
                dtype="float32",
                quantization=None,
                use_mla=False,
                get_num_layers=lambda _: LAYERS,
                get_num_kv_heads=lambda _: HEADS,
                get_head_size=lambda: HEAD_SIZE,
            ),
            cache_config=SimpleNamespace(
                block_size=self.size, num_gpu_blocks=blocks, cache_dtype="auto"
            ),
            scheduler_config=SimpleNamespace(async_scheduling=self.depth > 1),
            max_concurrent_batches=self.depth,
            kv_events_config=None,
        )

    def _become(self, rank: int) -> None:
        vllm_modules.current.rank = rank
        vllm_modules.current.group = self.workers[rank]

    # --- what a client does

    def add(
        self,
        name: str,
        prompt: list[int],
        answer: int,
        salt: str | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> Request:
        request = Request(name, prompt, answer, salt)
        request.kv_transfer_params = parameters
        self.requests[name] = request
        self.waiting.append(request)
        self.connector.on_new_request(request)
        return request

    def abort(self, name: str, *, now: bool = True) -> None:
        """Abort between steps, or (`now=False`) while the next step's output is on its way."""
        if not now:
            self.aborts.append(name)
            return
        request = self.requests.get(name)
        if request is None or request.finished:
            return
        for queue in (self.waiting, self.holding, self.running):
            if request in queue:
                queue.remove(request)
        self._finish(request, "FINISHED_ABORT")

    def reset(self, *, connector: bool = False, running: bool = False) -> bool:
        """reset_prefix_cache()."""
        if running:
            while self.running:
                self._preempt(self.running.pop(), drop_stale=True)
        done = self.pool.reset()
        if connector:
            done = self.connector.reset_cache() is not False and done
        return done

    @property
    def has_requests(self) -> bool:
        return bool(self.requests or self.finished_ids or self.connector.has_pending_push_work())

    def settle(self) -> None:
        """Step until there is nothing left to do."""
        for _ in range(SENT_WITHIN_STEPS):
            if not self.has_requests and not self.queue:
                return
            self.step()
        left = {name: request.status for name, request in self.requests.items()}
        raise AssertionError(f"the engine does not come to rest: {left or 'pending push work'}")

    def shutdown(self) -> None:
        """The executor ends first, then the scheduler."""
        for rank, worker in enumerate(self.workers):
            self._become(rank)
            worker.shutdown()
        self.connector.shutdown()

    # --- the engine core

    def step(self) -> None:
        """EngineCore.step, or step_with_batch_queue when `depth` is 2."""
        self.counts["steps"] += 1
        if self.has_requests:
            output = self._schedule()
            self.queue.append([output, None])
            if self.dice.random() < 0.5:
                self._execute_all()
            if len(self.queue) < self.depth and (output.work or self.has_requests):
                return
        elif not self.queue:
            return
        self._execute_one(self.queue[0])
        output, outcome = self.queue.popleft()
        while self.aborts:
            self.abort(self.aborts.pop())
        self._update(output, outcome)

    def _execute_all(self) -> None:
        for entry in self.queue:
            self._execute_one(entry)

    def _execute_one(self, entry: list[Any]) -> None:
        if entry[1] is None:
            entry[1] = self._execute(entry[0])

    # --- the scheduler

    def _schedule(self) -> Output:
        budget, scheduled, new, resumed = self.budget, [], [], []
        self.pool.fresh = []
        before, index = self.counts["preemptions"], 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = self._schedule_running(request, budget)
            if count < 0:
                break
            index += 1
            if count:
                scheduled.append((request, count))
                budget -= count
        synchronous = False
        if self.counts["preemptions"] == before:
            synchronous = self._schedule_waiting(budget, scheduled, new, resumed)
        work, counts = [], {}
        for request, count in scheduled:
            start = request.num_computed_tokens
            request.num_computed_tokens += count
            request.in_flight += count
            known = request.num_tokens + request.placeholders
            request.unfinished_prefill = request.num_computed_tokens < known
            samples = not request.unfinished_prefill
            if samples and self.depth > 1:
                request.placeholders += 1
            work.append((request, list(request.blocks), start, count, samples))
            counts[request.request_id] = count
        output = self._output(work, counts, new, resumed, synchronous)
        self.finished_ids, self.preempted_ids = set(), set()
        if work:
            self.scheduled_steps += 1
            for request, _ in scheduled:
                request.fence = self.scheduled_steps
        return output

    def _schedule_running(self, request: Request, budget: int) -> int:
        """Tokens to compute of a running request; -1: it was preempted or has to wait."""
        ends = request.num_prompt_tokens + request.max_tokens
        if request.placeholders and request.num_computed_tokens + 2 - request.placeholders >= ends:
            return 0
        known = request.num_tokens + request.placeholders
        count = min(known - request.num_computed_tokens, budget)
        if count <= 0:
            return 0
        while not self._allocate(request, request.num_computed_tokens + count):
            victim = self.running[-1]
            if not self._can_free(victim):
                return -1
            self.running.pop()
            self._preempt(victim)
            if victim is request:
                return -1
        self._cache(request, min(request.num_computed_tokens + count, request.num_tokens))
        return count

    def _schedule_waiting(self, budget: int, scheduled: Any, new: Any, resumed: Any) -> bool:
        synchronous = False
        skipped: list[Request] = []
        while budget > 0 and (self.holding or self.waiting):
            if len(self.running) >= self.most_running:
                break
            queue = self.holding or self.waiting
            request = queue[0]
            if request.status == REMOTE:
                if request.request_id not in self.received:
                    skipped.append(queue.popleft())
                    continue
                self._promote(request)
            if request.stale and not request.drop_stale:
                skipped.append(queue.popleft())
                continue
            local: list[int] = []
            external, asynchronous = 0, False
            if not request.num_computed_tokens:
                local = self._lookup(request)
                external, asynchronous = self._ask(request, len(local) * self.size)
                if external is None:
                    skipped.append(queue.popleft())
                    continue
                computed = len(local) * self.size + external
            else:
                computed = request.num_computed_tokens
            count = 0 if asynchronous else min(request.num_tokens - computed, budget)
            reserved = self._reserved() if asynchronous else 0
            if not self._allocate(request, computed + count, local, reserved, whole=True):
                break
            offered = SimpleNamespace(
                blocks=(tuple(SimpleNamespace(block_id=block) for block in request.blocks),),
                get_block_ids=lambda request=request: (list(request.blocks),),
            )
            more = (computed,) if self.dice.random() < 0.1 else ()  # a fork passes a fourth
            self.connector.update_state_after_alloc(request, offered, external, *more)
            self.counts["loaded"] += external
            queue.popleft()
            request.num_computed_tokens = computed
            if asynchronous:
                request.status, request.unfinished_prefill = REMOTE, True
                skipped.append(request)
                continue
            self._cache(request, min(computed + count, request.num_tokens))
            synchronous |= external > 0
            (resumed if request.num_preemptions else new).append(request)
            request.status = RUNNING
            self.running.append(request)
            scheduled.append((request, count))
            budget -= count
        for request in reversed(skipped):
            (self.holding if request.blocks else self.waiting).appendleft(request)
        return synchronous

    def _ask(self, request: Request, computed: int) -> tuple[int | None, bool]:
        external, asynchronous = self.connector.get_num_new_matched_tokens(request, computed)
        if self.dice.random() < 0.1:  # the question may be repeated
            again = self.connector.get_num_new_matched_tokens(request, computed)
            external, asynchronous = again
        if external is None:  # ask again in the next step
            return None, False
        assert external % self.size == 0
        assert external or not asynchronous
        assert computed + external <= request.num_tokens - (not asynchronous)
        if external > self.size and self.dice.random() < 0.1:  # some of it is not wanted
            external = self.size * self.dice.randrange(1, external // self.size)
        return external, asynchronous

    def _output(
        self, work: Any, counts: dict[str, int], new: Any, resumed: Any, synchronous: bool
    ) -> Output:
        cached = [entry for entry in work if entry[0] not in new]
        output = Output(
            num_scheduled_tokens=counts,
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=request.request_id,
                    prompt_token_ids=request.prompt_token_ids,
                    block_ids=(blocks,),
                    num_computed_tokens=start,
                )
                for request, blocks, start, _, _ in work
                if request in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[entry[0].request_id for entry in cached],
                resumed_req_ids={request.request_id for request in resumed},
                new_block_ids=[
                    (entry[1][entry[0].told :],) if len(entry[1]) > entry[0].told else None
                    for entry in cached
                ],
                num_computed_tokens=[entry[2] for entry in cached],
            ),
            finished_req_ids=self.finished_ids,
            preempted_req_ids=self.preempted_ids,
            has_sync_kv_loads=synchronous,
            work=work,
            fresh=self.pool.fresh,
        )
        if self.minor >= 30:
            output.kv_connector_block_state = SimpleNamespace(
                req_ids=set(counts),
                get_block_ids=lambda name: (list(self.requests[name].blocks),),
            )
        for request, blocks, *_ in work:
            request.told = len(blocks)
        output.kv_connector_metadata = self.connector.build_connector_meta(output)
        output.kv_connector_block_state = None
        return output

    # --- blocks

    def _lookup(self, request: Request) -> list[int]:
        found = []
        for count in range(self.size, request.num_tokens, self.size):
            block = self.pool.found.get(request.chain.state(count))
            if block is None:
                break
            found.append(block)
        return found

    def _reserved(self) -> int:
        """Blocks that prefills under way are still going to need; a failed load counts whole."""
        return sum(
            max(0, -(-request.num_tokens // self.size) - len(request.blocks))
            for request in self.requests.values()
            if request.unfinished_prefill
        )

    def _allocate(
        self,
        request: Request,
        tokens: int,
        local: list[int] | None = None,
        reserved: int = 0,
        whole: bool = False,
    ) -> bool:
        local = local or []
        idle = sum(not self.pool.users[block] for block in local)
        have = len(request.blocks) + len(local)
        if whole and -(-request.num_tokens // self.size) - have + idle > len(self.pool.free):
            return False
        wanted = max(0, -(-tokens // self.size) - have)
        if wanted + idle > len(self.pool.free) - reserved:
            return False
        for block in local:
            self.pool.share(block)
        request.cached += len(local)
        request.blocks += local
        request.blocks += [self.pool.take() for _ in range(wanted)]
        return True

    def _cache(self, request: Request, tokens: int) -> None:
        for index in range(request.cached, tokens // self.size):
            prefix, block = request.chain.state((index + 1) * self.size), request.blocks[index]
            if prefix not in self.pool.found and block not in self.pool.holds:
                self.pool.found[prefix], self.pool.holds[block] = block, prefix
            request.cached = index + 1

    def _can_free(self, request: Request) -> bool:
        return not self.defer_frees or request.fence <= self.processed_steps

    def _free(self, request: Request) -> None:
        blocks, request.blocks, request.cached, request.told = request.blocks, [], 0, 0
        if self._can_free(request):
            self.pool.release(blocks)
        else:
            self.deferred.append((self.scheduled_steps, blocks))

    def _preempt(self, request: Request, *, drop_stale: bool = False) -> None:
        self.counts["preemptions"] += 1
        self._free(request)
        request.status, request.num_computed_tokens = PREEMPTED, 0
        request.unfinished_prefill = False
        request.drop_stale = drop_stale or (request.drop_stale and request.stale > 0)
        request.stale, request.placeholders = request.in_flight, 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        self.preempted_ids.add(request.request_id)

    def _promote(self, request: Request) -> None:
        """A load is over: take in what it brought."""
        name = request.request_id
        if name in self.failed:
            self.failed.remove(name)
            if request.num_computed_tokens:
                self._cache(request, request.num_computed_tokens)
            else:
                self._free(request)
        else:
            self._cache(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
        self.received.remove(name)
        request.status = PREEMPTED if request.num_preemptions else WAITING

    # --- the workers

    def _execute(self, output: Output) -> list[ConnectorOutput]:
        if self.poisons:
            for memory in self.memories:
                memory.poison(output.fresh)
        suspects: list[tuple[Request, list[int]]] = []
        outcomes = [ConnectorOutput() for _ in self.workers]
        steps = []
        for rank, outcome in enumerate(outcomes):
            metadata = output.kv_connector_metadata
            if len(self.workers) > 1:  # workers are other processes then
                metadata = pickle.loads(pickle.dumps(metadata))
            steps.append(self._work(rank, output, metadata, suspects, outcome))
        while steps:  # ranks run side by side
            for rank, step in enumerate(list(steps)):
                self._become(rank)
                if next(step, None) is None:
                    steps.remove(step)
        invalid = set().union(*(outcome.invalid_block_ids for outcome in outcomes))
        for request, blocks in suspects:
            assert invalid & set(blocks), (
                f"{request.request_id} ({request.num_preemptions} preemptions) has read bytes that "
                f"are not its own in block {len(blocks) - 1} of {request.blocks}"
            )
        return outcomes

    def _work(
        self, rank: int, output: Output, metadata: Any, suspects: Any, outcome: ConnectorOutput
    ) -> Iterator[str]:
        """One worker's step; it yields where it would wait for the others."""
        worker, memory = self.workers[rank], self.memories[rank]
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        early = self.minor < 30 or output.has_sync_kv_loads
        if early:
            worker.start_load_kv(SimpleNamespace())
        yield "begun"
        for layer, name in enumerate(memory.tensors if output.work else ()):
            worker.wait_for_layer_load(name)
            self._attend(memory, layer, output, suspects)
            worker.save_kv_layer(name, memory.tensors[name], None)
            yield name
        if not early:
            worker.start_load_kv(SimpleNamespace())
        if output.work or self.minor >= 32:
            worker.wait_for_save()
        yield "computed"
        if self.minor >= 30:
            results = worker.get_transfer_results(output.finished_req_ids)
            outcome.finished_sending, outcome.finished_recving, failed = results
            outcome.failed_recving = set(failed)
        else:
            both = worker.get_finished(output.finished_req_ids)
            outcome.finished_sending, outcome.finished_recving = both
        outcome.invalid_block_ids = worker.get_block_ids_with_load_errors()
        outcome.kv_connector_stats = worker.get_kv_connector_stats()
        outcome.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()

    def _attend(self, memory: Memory, layer: int, output: Output, suspects: Any) -> None:
        for request, blocks, start, count, _ in output.work:
            memory.write(layer, blocks, start, request.chain.states(start + count))
        for request, blocks, start, count, _ in output.work:
            place = memory.first_wrong(layer, blocks, request.chain.states(start + count))
            if place >= 0:
                suspects.append((request, blocks[: place // self.size + 1]))

    # --- after the step

    def _aggregate(self, outcomes: list[ConnectorOutput]) -> ConnectorOutput:
        """What all ranks have said: an end counts when every one of them has reported it."""
        whole = ConnectorOutput()
        for kind, left in (
            ("finished_sending", self._still_sending),
            ("finished_recving", self._still_receiving),
        ):
            ended = set()
            for outcome in outcomes:
                for name in getattr(outcome, kind) or ():
                    left[name] = left.get(name, len(self.workers)) - 1
                    if not left[name]:
                        del left[name]
                        ended.add(name)
            setattr(whole, kind, ended or None)
        for outcome in outcomes:
            whole.invalid_block_ids |= outcome.invalid_block_ids
            whole.failed_recving |= outcome.failed_recving
        return whole

    def _update(self, output: Output, outcomes: list[ConnectorOutput]) -> None:
        result = self._aggregate(outcomes)
        if output.work:
            self.processed_steps += 1
            while self.deferred and self.deferred[0][0] <= self.processed_steps:
                self.pool.release(self.deferred.popleft()[1])
        skip = self._recover(result.invalid_block_ids, output.num_scheduled_tokens)
        self._recover_whole(result.failed_recving)
        for request, _, _, count, samples in output.work:
            request.in_flight -= count
            stale = request.stale > 0
            if stale:
                request.stale -= count
            if request in skip or request.finished or (stale and request.drop_stale):
                continue
            if samples:
                self._take_token(request, stale)
        if output.work or any((result.finished_sending, result.finished_recving)):
            self._take_ends(result)
        else:
            self._take_ends(result, nothing_new=True)
        self.connector.get_kv_connector_stats()
        list(self.connector.take_events())

    def _take_token(self, request: Request, stale: bool) -> None:
        request.all_token_ids.append(request.chain.token(request.num_tokens))
        was = request.status
        if not stale and self.depth > 1:
            request.placeholders -= 1
            assert request.placeholders >= 0
        if was == RUNNING:
            self._cache(request, request.num_computed_tokens - request.placeholders)
        if len(request.output_token_ids) >= request.max_tokens:
            (self.running if was == RUNNING else self.waiting).remove(request)
            kind = "FINISHED_STOP" if self.dice.random() < 0.5 else "FINISHED_LENGTH"
            self._finish(request, kind)

    def _finish(self, request: Request, kind: str) -> None:
        name = request.request_id
        delayed = request.status == REMOTE and name not in self.received
        if request.status == REMOTE:
            self.received.discard(name)
            self.failed.discard(name)
        request.status = kind
        request.unfinished_prefill = False
        held = request.blocks[: -(-request.num_computed_tokens // self.size)]
        delay, _ = self.connector.request_finished(request, list(held))
        self.finished_ids.add(name)
        if not (delayed or delay):
            self._let_go(request)

    def _let_go(self, request: Request) -> None:
        assert request.finished
        self._free(request)
        del self.requests[request.request_id]

    def _take_ends(self, result: ConnectorOutput, *, nothing_new: bool = False) -> None:
        # vLLM asks on steps without tokens only when there is something to hand over
        if not nothing_new or self.dice.random() < 0.5:
            self.connector.update_connector_output(result)
        for name in result.finished_recving or ():
            request = self.requests[name]
            if request.status == REMOTE:
                self.received.add(name)
            else:
                assert request.finished, f"{name} was loaded while it is {request.status}"
                self._let_go(request)
        for name in result.finished_sending or ():
            self._let_go(self.requests[name])

    def _recover_whole(self, failed: set[str]) -> None:
        for name in failed:
            request = self.requests.get(name)
            if request is not None and request.status == REMOTE:
                request.num_computed_tokens = 0
                self.failed.add(name)

    def _recover(self, invalid: set[int], counts: dict[str, int]) -> set[Request]:
        """_handle_invalid_blocks with the policy "recompute"."""
        if not invalid:
            return set()
        self.counts["failed"] += len(invalid)
        loading = [request for request in self.holding if request.status == REMOTE]
        self.failed |= {request.request_id for request in self._affected(loading, invalid, counts)}
        return self._affected(self.running, invalid, counts)

    def _affected(
        self, requests: list[Request], invalid: set[int], counts: dict[str, int]
    ) -> set[Request]:
        affected, marked = set(), set()
        for request in requests:
            computed = request.num_computed_tokens - counts.get(request.request_id, 0)
            hit, cut = False, False
            for index, block in zip(range(-(-computed // self.size)), request.blocks, strict=False):
                if block not in invalid:
                    continue
                hit = True
                if block in marked:
                    continue
                marked.add(block)
                if not cut:
                    cut = True
                    request.num_computed_tokens = index * self.size
            if hit and not cut:
                request.num_computed_tokens = computed
            if hit:
                self.counts["recovered"] += 1
                affected.add(request)
        return affected
