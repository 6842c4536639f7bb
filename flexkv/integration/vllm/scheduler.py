"""The connector in vLLM's scheduler: owns the manager, matches, launches, reports.

`matched_tokens` - `allocated` - `news` (once per step) - `outcome` - `finished` - `take_events`,
`take_stats` - `reset`, `close`.

vLLM's thread only asks for matches, while the loop rests; everything else is posted to the
manager's loop thread, and what becomes of it waits in `_done` for the next step. Each load and each
save that was started is reported exactly once, when none of its bytes can move any more.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import FlexKVError
from flexkv.integration.vllm.events import open_events
from flexkv.integration.vllm.geometry import describe
from flexkv.integration.vllm.messages import StepNews
from flexkv.integration.vllm.metrics import FlexKVStats, Metrics
from flexkv.integration.vllm.options import Options
from flexkv.integration.vllm.requests import State, Work, namespace_of, serves
from flexkv.integration.vllm.saves import Saves
from flexkv.ranks import RankServer
from flexkv.sync import BlockingKVManager
from flexkv.telemetry import log
from flexkv.transfer import Plan

_JOIN_S = 10.0
_IDLE_S = 0.002
_RESET_MS = 10_000
_WHOLE_ENDS = ("STOP", "LENGTH")  # reasons after which a request's blocks are complete


class SchedulerSide:
    """Serves the scheduler of one engine.

    Raises:
        LayoutError, ConfigError, CapacityError: the engine cannot be served as it is configured.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, version: str) -> None:
        transfer = vllm_config.kv_transfer_config
        self._options = Options.read(transfer.kv_connector_extra_config)
        geometry = describe(vllm_config, kv_cache_config, version)
        self._size = geometry.tokens_per_block
        self._server = RankServer(
            self._options.socket_path(vllm_config),
            ranks=geometry.ranks,
            share_bytes=geometry.share.block_bytes,
            blocks=geometry.blocks,
            timeout_ms=self._options.rank_timeout_ms,
        )
        config = self._options.manager_config(vllm_config, geometry, self._server)
        self.kv = BlockingKVManager(config)
        self.kv.__enter__()
        self.kv.register(None)
        if not self._server.wait_ready(_JOIN_S):
            log.warning("vllm.workers_missing", ranks=geometry.ranks)
        self._saves = Saves(
            0 if self._options.save == "none" else self._options.save_every_tokens,
            self._size,
            self._save,
            prompt_only=self._options.save == "prompt",
        )
        self._states: dict[str, State] = {}
        self._step = 0
        self._numbers = 0
        self._pending = 0
        self._awaited: list[tuple[int, list[int]]] = []
        self._done: deque[Work] = deque()
        self._news = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._metrics = Metrics(self.kv.manager.telemetry, self._options.metrics_port)
        self._events = open_events(self.kv, self._size, vllm_config)

    # --- vLLM's thread

    def arrived(self, request: Any) -> None:
        """Take in a new request: its tokens become an array here, not when it is scheduled."""
        if serves(request):
            self._state(request).read(request)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """Return how many tokens behind `computed` can be loaded, and whether asynchronously."""
        if computed % self._size or not self._server.ready or not serves(request):
            return 0, False
        state = self._state(request)
        if state.load_failed:
            # It is computed now. Were a load offered again, vLLM would count its blocks twice when
            # it looks for room, and with little of that wait for ever.
            return 0, False
        question = (computed, request.num_tokens)
        if state.plan is None or not state.plan.open or state.asked != question:
            self._drop_plan(state)
            tokens = state.read(request)
            try:
                plan = self.kv.visit(self._match, tokens, state.namespace, computed)
            except FlexKVError as error:
                log.error("vllm.match_failed", request=request.request_id, error=repr(error))
                return 0, False
            state.asked = question
            state.plan = plan
        if state.plan is None or state.plan.matched < self._options.min_load_tokens:
            self._drop_plan(state)
            return 0, False
        return state.plan.matched, self._options.load == "async"

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
        load = Work(request.request_id, list(blocks.get_block_ids()[0][first:last]), True)
        if self._options.load == "sync":
            self._numbers += 1
            load.number, load.silent = self._numbers, True
            self._awaited.append((load.number, load.blocks))
        load.naming = self._events.naming(request, state.tokens, last)
        state.load = load
        state.known_tokens = computed + loading
        # The blocks may still be in use by the steps before this one.
        self._server.stamps.give(load.blocks, self._step + 1, load.number)
        self._pending += 1
        self._metrics.add("loads")
        self._metrics.add("asked_tokens", loading)
        self.kv.post(self._launch, load, plan, state.tokens, state.namespace, computed)

    def news(self, output: Any) -> StepNews:
        """Return what the workers, and through them the scheduler, have to know with this step."""
        self._step += 1
        if not output.total_num_scheduled_tokens and self.busy():
            # Nothing is computed in this step: better to wait for the end of a transfer than to
            # take the interpreter from the threads that bring it about.
            self._news.clear()
            if not self._done:
                self._news.wait(_IDLE_S)
        withdrawn = self._saves.scheduled(output)
        news = StepNews(self._step, awaited=self._awaited, withdrawn=withdrawn)
        self._awaited = []
        while self._done:
            work = self._settle(self._done.popleft())
            if work is None:
                continue
            (news.received if work.is_load else news.sent).add(work.request)
            if not work.number:  # of those the workers know by themselves
                news.failed.update(work.failed)
        return news

    def outcome(self, output: Any) -> None:
        """Add to a step's outcome what has ended well meanwhile: one step earlier than by `news`.

        Failures go the other way, because vLLM has looked at failed blocks before it asks here.
        """
        for work in list(self._done):
            if work.failed:
                continue
            self._done.remove(work)
            if self._settle(work) is None:
                continue
            name = "finished_recving" if work.is_load else "finished_sending"
            setattr(output, name, {*(getattr(output, name) or ()), work.request})
        self._saves.computed()

    def finished(self, request: Any, block_ids: list[int]) -> bool:
        """Forget a request; store its blocks. True: they stay in use until its end is reported."""
        state = self._states.pop(request.request_id, None)
        if state is None:
            return False
        name, saves = request.request_id, list(self._saves.finished(request.request_id))
        self._drop_plan(state)
        load = state.load
        if load is not None and not load.reported:
            if not load.number:  # vLLM waits for its end by itself
                self.kv.post(self._cancel, load)
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
        count = min(usable // self._size, len(block_ids))
        covered = max([state.known_tokens, *(len(save.blocks) * self._size for save in saves)])
        if count * self._size > covered:
            saves.append(self._save(request, state, list(block_ids[:count])))
        return self._saves.wait_for(name, saves)

    def _save(self, request: Any, state: State, blocks: list[int]) -> Work:
        """Store a request's first blocks."""
        save = Work(request.request_id, blocks, False)
        self._server.stamps.give(blocks, self._step)
        self._pending += 1
        self._metrics.add("saves")
        tokens = state.read(request)[: len(blocks) * self._size]
        save.naming = self._events.naming(request, tokens, len(blocks))
        self.kv.post(self._put, save, tokens, state.namespace)
        return save

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

    def close(self) -> None:
        """Close the manager. Twice is fine."""
        self._metrics.close()
        self.kv.close()

    def _state(self, request: Any) -> State:
        state = self._states.get(request.request_id)
        if state is None:
            state = self._states[request.request_id] = State(namespace_of(request))
        return state

    def _drop_plan(self, state: State) -> None:
        plan, state.plan = state.plan, None
        if plan is not None:
            self.kv.post(plan.cancel)

    def _settle(self, work: Work) -> Work | None:
        """Book the end of a load or save; None if nobody is to be told."""
        self._pending -= 1
        work.reported = True
        self._metrics.count(work, self._size)
        if not work.is_load:
            return work if self._saves.over(work) else None
        if work.failed:
            state = self._states.get(work.request)
            if state is not None:
                state.known_tokens, state.load_failed = 0, True
        return None if work.silent else work

    # --- the manager's thread

    def _match(
        self, tokens: NDArray[np.int32], namespace: tuple[str, ...], computed: int
    ) -> Plan | None:
        leave = 0 if self._options.load == "async" else 1
        plan = self.kv.manager.get_match(
            tokens, namespace=namespace, computed_tokens=computed, leave_tokens=leave
        )
        if plan.matched:
            return plan
        plan.cancel()
        return None

    def _slots(self, blocks: list[int]) -> NDArray[np.int64]:
        starts = np.asarray(blocks, np.int64) * self._size
        return (starts[:, None] + np.arange(self._size)).reshape(-1)

    def _launch(
        self,
        load: Work,
        plan: Plan | None,
        tokens: NDArray[np.int32],
        namespace: tuple[str, ...],
        computed: int,
    ) -> None:
        wanted = len(load.blocks) * self._size
        manager = self.kv.manager
        try:
            if plan is None or not plan.open or plan.matched != wanted:
                if plan is not None:
                    plan.cancel()
                plan = manager.get_match(
                    tokens[: computed + wanted], namespace=namespace, computed_tokens=computed
                )
            layerwise = self._options.load == "sync"
            slots = self._slots(load.blocks)
            load.transfer = manager.launch(plan, slots, layerwise=layerwise)
            self._events.learn(plan.keys, load.naming, computed // self._size)
        except FlexKVError as error:
            log.warning("vllm.load_failed", request=load.request, error=repr(error))
            self._report(load, tuple(load.blocks))
            return
        self._watch(load)

    def _put(self, save: Work, tokens: NDArray[np.int32], namespace: tuple[str, ...]) -> None:
        try:
            save.transfer = self.kv.manager.put_async(
                tokens, self._slots(save.blocks), namespace=namespace
            )
            self._events.learn(save.transfer.keys, save.naming)
        except FlexKVError as error:
            log.warning("vllm.save_failed", request=save.request, error=repr(error))
            self._report(save)
            return
        self._watch(save)

    def _cancel(self, work: Work) -> None:
        if work.transfer is not None:
            work.transfer.cancel()

    def _watch(self, work: Work) -> None:
        task = asyncio.get_running_loop().create_task(self._wait_for(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait_for(self, work: Work) -> None:
        assert work.transfer is not None
        await work.transfer.quiesced()
        work.book(work.transfer)
        if work.is_load:
            self._report(work, tuple(work.blocks[work.moved_tokens // self._size :]))
            return
        settled = self._events.settle()  # before vLLM hears of the end, and may fall asleep
        self._report(work)
        await settled

    def _report(self, work: Work, failed: tuple[int, ...] = ()) -> None:
        work.failed = failed
        if work.number:
            self._server.tell_loaded(work.number, failed)
        self._done.append(work)
        self._news.set()
