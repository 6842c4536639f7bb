"""The connector in vLLM's scheduler: owns the manager, matches, launches, reports.

`matched_tokens` - `allocated` - `news` (once per step) - `outcome` - `finished` - `take_events`,
`take_stats` - `reset`, `close`.

vLLM's thread only asks for matches, in between what the loop does; everything else is posted to the
manager's loop thread, see `carrier`, and what becomes of it waits there for the next step. Each
load and each save that was started is reported exactly once, when none of its bytes can move any
more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

from flexkv.errors import FlexKVError
from flexkv.integration.vllm.carrier import Carrier
from flexkv.integration.vllm.events import open_events
from flexkv.integration.vllm.geometry import describe
from flexkv.integration.vllm.groups import GroupTable
from flexkv.integration.vllm.hints import Hint, read_hint
from flexkv.integration.vllm.messages import StepNews
from flexkv.integration.vllm.metrics import FlexKVStats, Metrics
from flexkv.integration.vllm.options import Options
from flexkv.integration.vllm.overdue import Overdue
from flexkv.integration.vllm.pace import Pace
from flexkv.integration.vllm.requests import State, Work, namespace_of, serves
from flexkv.integration.vllm.saves import Saves
from flexkv.integration.vllm.sync_loads import SyncLoads
from flexkv.ranks import RankServer
from flexkv.sync import BlockingKVManager
from flexkv.telemetry import log

_JOIN_S = 10.0
_IDLE_S = 0.002
_RESET_MS = 10_000
_HANGS_S = 0.01  # to see whether a manager that did not answer does so again
_WHOLE_ENDS = ("STOP", "LENGTH")  # reasons after which a request's blocks are complete


class SchedulerSide:
    """Serves the scheduler of one engine.

    Raises:
        LayoutError, ConfigError, CapacityError: the engine cannot be served as it is configured.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, version: str) -> None:
        self._options = Options.read(vllm_config.kv_transfer_config.kv_connector_extra_config)
        geometry = describe(vllm_config, kv_cache_config, version)
        self._size = geometry.tokens_per_block
        self._groups = GroupTable(geometry)
        self._asynchronous = self._options.load == "async" or not self._groups.by_block
        self._server = RankServer(
            self._options.socket_path(vllm_config),
            shares=[geometry.share(rank).block_bytes for rank in range(geometry.ranks)],
            blocks=geometry.blocks,
            timeout_ms=self._options.rank_timeout_ms,
        )
        config = self._options.manager_config(vllm_config, geometry, self._server)
        self.kv = BlockingKVManager(config)
        ahead = max(2, vllm_config.parallel_config.pipeline_parallel_size)
        self._pace = Pace(self._computed, ahead) if config.fetch_or_recompute else None
        self.kv.__enter__()
        self.kv.register(None)
        if not self._server.wait_ready(_JOIN_S):
            log.warning("vllm.workers_missing", ranks=geometry.ranks)
        at_end = self._options.save == "none" or not self._groups.by_block
        self._saves = Saves(
            0 if at_end else self._options.save_every_tokens,
            self._size,
            self._save,
            prompt_only=self._options.save == "prompt",
        )
        self._states: dict[str, State] = {}
        self._step = self._pending = 0
        self._hangs = False  # the manager did not answer the last time
        self._overdue = Overdue(self._options.engine_wait_ms / 1e3)
        self._awaiting_step = 0  # the one that the last load waits for
        self.sync_loads = SyncLoads(self._size)
        self._metrics = Metrics(self.kv.manager.telemetry, self._options.metrics_port)
        self._events = open_events(self.kv, self._size, vllm_config)
        self._carrier = Carrier(
            self.kv.manager,
            self._server,
            self._groups,
            self._events,
            asynchronous=self._asynchronous,
        )

    @property
    def by_block(self) -> bool:
        """See Geometry.by_block."""
        return self._groups.by_block

    # --- vLLM's thread

    def bind(self, pool: Any) -> None:
        """Take vLLM's block pool."""
        self.sync_loads.pool = pool
        self._groups.bind(pool)

    def arrived(self, request: Any) -> None:
        """Take in a new request: its tokens become an array here, not when it is scheduled."""
        if serves(request):
            self._state(request).read(request)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens behind `computed` can be loaded (None: ask in the next step), and
        whether asynchronously.
        """
        if not serves(request):
            return 0, False
        state = self._state(request)
        state.read(request)
        if self.sync_loads.concerns(state, computed):
            return None, False
        # After a failed load it is computed. Were one offered again, vLLM would count its blocks
        # twice when it looks for room, and with little of that wait for ever.
        if state.load_failed or computed % self._size or not self._server.ready:
            return 0, False
        question = (computed, request.num_tokens)
        if state.plan is None or not state.plan.open or state.asked != question:
            self._drop_plan(state)
            wait_s = _HANGS_S if self._hangs else self._options.match_timeout_ms / 1e3
            try:
                plan = self.kv.visit(self._carrier.match, state, computed, timeout_s=wait_s)
            except (FlexKVError, TimeoutError) as error:
                log.error("vllm.match_failed", request=request.request_id, error=repr(error))
                self._hangs = isinstance(error, TimeoutError)
                return 0, False
            self._hangs = False
            state.asked, state.plan = question, plan
            self._groups.keep_window(request, state.junction_tokens)
        if state.plan is None or state.plan.matched < self._options.min_load_tokens:
            self._drop_plan(state)
            return 0, False
        return state.plan.matched, self._asynchronous

    def allocated(self, request: Any, blocks: Any, loading: int) -> None:
        """Start the load of `loading` tokens into the request's blocks; 0: there is none."""
        state = self._states.get(request.request_id)
        if state is None:
            return
        self._saves.admitted(request, state)
        if not loading:
            self._drop_plan(state)
            return
        plan, state.plan = state.plan, None
        computed = state.asked[0]
        first, last = computed // self._size, (computed + loading) // self._size
        held = blocks.get_block_ids()
        parts = self._groups.to_load(held, first, last)
        load = Work(request.request_id, list(chain.from_iterable(parts)), True, self._step + 1)
        load.tokens, load.parts = loading, tuple(len(part) * self._size for part in parts)
        if not self._asynchronous:
            self.sync_loads.begin(load, state, computed, held[0])
            self._server.last_load = load.number
        load.naming = self._events.naming(request, state.tokens, last)
        state.load = load
        state.known_tokens = computed + loading
        self._awaiting_step = self._step + 1
        self._pending += 1
        self._overdue.add(load)
        self._metrics.add("loads")
        self._metrics.add("asked_tokens", loading)
        self.kv.post(self._carrier.launch, load, plan, state.tokens, state.namespace, computed)

    def news(self, output: Any) -> StepNews:
        """Return what the workers, and through them the scheduler, have to know with this step."""
        self._step += 1
        if self._pace is not None:
            self._pace.scheduled(output, time.monotonic())
        begins = self._awaiting_step == self._step
        if not output.total_num_scheduled_tokens and self.busy() and not begins:
            # Nothing is computed in this step: better to wait for the end of a transfer than to
            # take the interpreter from the threads that bring it about.
            self._carrier.news.clear()
            if not self._carrier.done:
                self._carrier.news.wait(_IDLE_S)
        withdrawn = self._saves.scheduled(output)
        for late in self._overdue.take():
            log.error("vllm.given_up", request=late.request, blocks=len(late.blocks))
            withdrawn += late.blocks
            self._carrier.done.append(late)
        awaited = self.sync_loads.take_awaited()
        news = StepNews(self._step, awaited=awaited, withdrawn=withdrawn)
        while self._carrier.done:
            work = self._settle(self._carrier.done.popleft())
            if work is None:
                continue
            (news.received if work.is_load else news.sent).add(work.request)
            if work.failed and not self._groups.by_block:
                news.failed_requests.add(work.request)
            elif not work.number:  # of those the workers know by themselves
                news.failed.update(work.failed)
        return news

    def outcome(self, output: Any) -> None:
        """Add to a step's outcome what has ended well meanwhile: one step earlier than by `news`.

        Failures go the other way, because vLLM has looked at failed blocks before it asks here.
        """
        if self._pace is not None:
            self._pace.over(time.monotonic())
        self.sync_loads.outcome(output.invalid_block_ids)
        for work in list(self._carrier.done):
            if work.failed:
                continue
            self._carrier.done.remove(work)
            if self._settle(work) is None:
                continue
            name = "finished_recving" if work.is_load else "finished_sending"
            setattr(output, name, {*(getattr(output, name) or ()), work.request})
        self._saves.computed()

    def finished(self, request: Any, block_ids: Sequence[list[int]]) -> bool:
        """Forget a request; store its blocks, given by group. True: they stay in use until its end
        is reported.
        """
        state = self._states.pop(request.request_id, None)
        if state is None:
            return False
        name, load = request.request_id, state.load
        saves = list(self._saves.finished(name))
        self._drop_plan(state)
        if load is not None and not load.reported:
            if not load.number:  # vLLM waits for its end by itself
                self.kv.post(load.cancel)
                return False
            # A synchronous load is not cut short: vLLM may count its blocks as cached already.
            load.is_load = False
            return self._saves.wait_for(name, [*saves, load])
        ended = request.get_finished_reason()
        if self._options.save == "none" or getattr(ended, "name", None) not in _WHOLE_ENDS:
            return self._saves.wait_for(name, saves)
        usable = min(request.num_tokens - 1, request.num_computed_tokens)
        if self._options.save == "prompt":
            usable = min(usable, request.num_prompt_tokens)
        count = self._groups.complete(block_ids, usable // self._size)
        if state.hint is not None:
            self._extend_hint(state.hint, state, request.num_prompt_tokens, count * self._size)
        covered = max([state.known_tokens, *(save.tokens for save in saves)])
        if count * self._size > covered:
            answer = request.num_tokens - request.num_prompt_tokens
            saves.append(self._save(request, state, block_ids, count, answer))
        return self._saves.wait_for(name, saves)

    def _extend_hint(self, hint: Hint, state: State, prompt: int, stored: int) -> None:
        """Have the hint on a prompt cover what is stored of the answer, too."""
        if hint.retain and stored // self._size > prompt // self._size:
            over = Hint(hint.request, {"ttl_s": 0.0})
            self.kv.post(self._carrier.heed, over, state.tokens[:prompt], state.namespace)
            later = Hint(hint.request, hint.retain)
            self.kv.post(self._carrier.heed, later, state.tokens[:stored], state.namespace)

    def _save(
        self,
        request: Any,
        state: State,
        block_ids: Sequence[list[int]],
        count: int,
        answer_tokens: int | None = None,
    ) -> Work:
        """Store a request's first `count` blocks, given by group."""
        # of windows, those before places where the next request may part from this one
        ends = request.num_prompt_tokens, request.num_prompt_tokens - 1, state.junction_tokens
        found = self._groups.to_save(request, block_ids, count, ends)
        save = Work(request.request_id, found.blocks, False, self._step, count * self._size)
        save.held, save.kept, save.answer_tokens = found.held, found.kept, answer_tokens
        self._pending += 1
        self._overdue.add(save)
        self._metrics.add("saves")
        tokens = state.read(request)[: save.tokens]
        save.naming = self._events.naming(request, tokens, count)
        self.kv.post(self._carrier.put, save, tokens, state.namespace)
        return save

    def _computed(self, tokens: int, elapsed_ms: float, past_tokens: int) -> None:
        tell = partial(self.kv.manager.computed, past_tokens=past_tokens)
        self.kv.post(tell, tokens, elapsed_ms)

    def busy(self) -> bool:
        """Whether an end, or an event, is still to be reported."""
        return self._pending > 0 or self._events.busy

    def take_events(self) -> list[Any]:
        """Return what became readable in which tier, and what left, as vLLM's KVCacheEvents."""
        return self._events.take()

    def take_stats(self) -> FlexKVStats | None:
        """Return what was counted since the last time, or None."""
        return self._metrics.take()

    def reset(self) -> bool:
        """Forget everything that is cached; False if transfers did not end in time."""
        try:
            self.kv.run(self.kv.manager.reset, timeout_ms=_RESET_MS)
        except (FlexKVError, TimeoutError) as error:
            log.error("vllm.reset_failed", error=repr(error))
            return False
        return True

    def abandon(self) -> None:
        """Part from the workers: nothing can be copied into or out of them any more."""
        self._server.close()

    def close(self) -> None:
        """Close the manager. Twice is fine."""
        self._metrics.close()
        self.kv.close()

    def _state(self, request: Any) -> State:
        state = self._states.get(request.request_id)
        if state is None:
            state = self._states[request.request_id] = State(namespace_of(request))
            state.hint = read_hint(request)
            if state.hint is not None:
                self.kv.post(self._carrier.heed, state.hint, state.read(request), state.namespace)
        return state

    def _drop_plan(self, state: State) -> None:
        plan, state.plan = state.plan, None
        if plan is not None:
            self.kv.post(plan.cancel)

    def _settle(self, work: Work) -> Work | None:
        """Book the end of a load or save; None if nobody is to be told."""
        if work.reported:  # it was given up
            return None
        self._pending -= 1
        work.reported = True
        self._groups.give_back(work.kept)
        self._metrics.count(work, self._size)
        if not work.is_load:
            return work if self._saves.over(work) else None
        if work.failed:
            state = self._states.get(work.request)
            if state is not None:
                state.known_tokens, state.load_failed = 0, True
        return None if work.silent else work
