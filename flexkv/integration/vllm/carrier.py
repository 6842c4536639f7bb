"""What the scheduler's side does on the manager's thread: looks up, launches, puts, waits for ends.

`Carrier.match` - `launch`, `put` (a load, a save) - `heed` (a hint). What has ended waits in
`done`, and `news` is set: vLLM's thread takes it from there.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import CapacityError
from flexkv.integration.vllm.events import NoEvents
from flexkv.integration.vllm.groups import GroupTable
from flexkv.integration.vllm.hints import Hint
from flexkv.integration.vllm.requests import State, Work, slots_of
from flexkv.manager import KVManager
from flexkv.ranks import RankServer
from flexkv.telemetry import log
from flexkv.transfer import Plan


class Carrier:
    """Loads and saves of one engine; all calls belong to the manager's thread, but for `match`,
    which may visit it.
    """

    def __init__(
        self,
        manager: KVManager,
        server: RankServer,
        groups: GroupTable,
        events: NoEvents,
        *,
        asynchronous: bool,
    ) -> None:
        self._manager, self._server, self._groups, self._events = manager, server, groups, events
        self._asynchronous, self._size = asynchronous, manager.config.tokens_per_block
        self.done: deque[Work] = deque()
        self.news = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def match(self, state: State, computed: int) -> Plan | None:
        """Look up what can be loaded behind `computed` tokens; None: nothing."""
        # A step computes one token at least. vLLM takes it back from an asynchronous load, which
        # it cannot do with a window: the block before may have been given up.
        plan = self._manager.get_match(
            state.tokens,
            namespace=state.namespace,
            computed_tokens=computed,
            leave_tokens=0 if self._asynchronous and self._groups.by_block else 1,
            groups=self._groups.cache,
        )
        found = plan.offset + plan.matched
        state.junction_tokens = plan.reach if plan.reach > found else 0
        if plan.matched:
            return plan
        plan.cancel()
        return None

    def launch(
        self,
        load: Work,
        plan: Plan | None,
        tokens: NDArray[np.int32],
        namespace: tuple[str, ...],
        computed: int,
    ) -> None:
        """Start a load of what lies behind `computed` tokens, by `plan` if it is still good."""
        manager = self._manager
        try:
            if plan is None or not plan.open or plan.matched != load.tokens:
                if plan is not None:
                    plan.cancel()
                plan = manager.get_match(
                    tokens[: computed + load.tokens],
                    namespace=namespace,
                    computed_tokens=computed,
                    groups=self._groups.cache,
                    weigh=False,  # vLLM counts on all of it
                )
            self._groups.check(plan, load)
            slots = slots_of(load.blocks, self._size)
            plan.tag = load.step, load.number
            load.transfer = manager.launch(plan, slots, layerwise=bool(load.number))
        except Exception as error:
            log.warning("vllm.load_failed", request=load.request, error=repr(error))
            if plan is not None:
                plan.cancel()
            self._report(load, tuple(load.blocks))
            return
        self._watch(load)
        for keys, first, group in self._groups.loaded(plan):
            self._events.learn(keys, load.naming, first, group)

    def put(self, save: Work, tokens: NDArray[np.int32], namespace: tuple[str, ...]) -> None:
        """Start a save."""
        plan: Plan | None = None
        try:
            plan = self._manager.put_match(
                tokens,
                namespace=namespace,
                groups=self._groups.cache,
                held=save.held,
                output_tokens=save.answer_tokens,
            )
            plan.tag = save.step, 0
            save.transfer = self._manager.launch(plan, slots_of(save.blocks, self._size))
        except Exception as error:
            if plan is not None:
                plan.cancel()
            if isinstance(error, CapacityError):
                self._manager.telemetry.add("refused_puts", 1)
            log.warning("vllm.save_failed", request=save.request, error=repr(error))
            self._report(save)
            return
        self._watch(save)
        for keys, first, group in self._groups.saved(save.transfer.keys, save.held):
            self._events.learn(keys, save.naming, first, group)

    def heed(self, hint: Hint, tokens: NDArray[np.int32], namespace: tuple[str, ...]) -> None:
        """Do what a hint on a prompt says."""
        given: dict[str, Any] = {"namespace": namespace, "groups": self._groups.cache}
        try:
            if hint.retain:
                self._manager.retain(tokens, **given, **hint.retain)
            if hint.prefetch:
                self._manager.prefetch_async(tokens, **given)
        except Exception as error:
            log.warning("vllm.hint_ignored", request=hint.request, error=repr(error))

    def _watch(self, work: Work) -> None:
        task = asyncio.get_running_loop().create_task(self._wait_for(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait_for(self, work: Work) -> None:
        assert work.transfer is not None
        try:
            await work.transfer.quiesced(math.inf)  # vLLM would write over blocks in use
            work.book(work.transfer)
        except Exception as error:
            log.warning("vllm.transfer_failed", request=work.request, error=repr(error))
        if work.is_load:
            self._report(work, tuple(work.blocks[work.moved_tokens // self._size :]))
            return
        settled = self._events.settle()  # before vLLM hears of the end, and may fall asleep
        self._report(work)
        await settled

    def _report(self, work: Work, failed: tuple[int, ...] = ()) -> None:
        work.failed = failed
        self.done.append(work)
        self.news.set()
        if work.number:
            self._server.tell_loaded(work.number, failed)
