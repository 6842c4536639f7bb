"""What stands between vLLM's scheduler and flexkv's: no failure of flexkv gets past `Guard`.

`bind`, `arrived`, `matched_tokens`, `allocated`, `news`, `outcome`, `finished`, `busy`,
`take_events`, `take_stats`, `reset`, `close`: the verbs of `SchedulerSide` - `lost`.

It knows by itself which requests vLLM holds back for the sake of a load or save. When flexkv's side
raises, or its manager breaks, it is lost: the workers are parted from, so that no byte can land any
more, what is owed is reported as failed, and nothing is asked of it again. vLLM goes on without it:
no hits, no saves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from flexkv.errors import BrokenManagerError
from flexkv.integration.vllm.messages import StepNews
from flexkv.integration.vllm.scheduler import SchedulerSide
from flexkv.telemetry import log

T = TypeVar("T")
_GRACE_S = 2.0


class Guard:
    """Answers for one SchedulerSide, whatever becomes of it."""

    def __init__(self, side: SchedulerSide) -> None:
        self.side, self.kv, self.lost = side, side.kv, False
        config = side.kv.manager.config
        self._size = config.tokens_per_block
        self._close_s = config.close_timeout_ms / 1e3 + _GRACE_S
        self._answers: dict[str, tuple[int, bool]] = {}  # computed tokens, whether asynchronously
        self._loads: dict[str, list[int]] = {}  # request -> blocks
        self._saves: set[str] = set()
        self._waits_for: set[int] = set()  # blocks of loads within the step being scheduled
        self._step = 0

    def bind(self, pool: Any) -> None:
        """See SchedulerSide.bind."""
        self._try(self.side.bind, None, pool)

    def arrived(self, request: Any) -> None:
        """See SchedulerSide.arrived."""
        self._try(self.side.arrived, None, request)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """See SchedulerSide.matched_tokens."""
        nothing: tuple[int | None, bool] = 0, False
        answer = self._try(self.side.matched_tokens, nothing, request, computed)
        self._answers[request.request_id] = computed, answer[1]
        return answer

    def allocated(self, request: Any, blocks: Any, loading: int) -> None:
        """See SchedulerSide.allocated."""
        computed, asynchronous = self._answers.pop(request.request_id, (0, False))
        if loading:
            groups = blocks.get_block_ids()
            first = computed // self._size
            ids = list(groups[0][first : first + loading // self._size])
            if not self.side.by_block:  # vLLM has to hear of the request then
                self._loads[request.request_id] = []
            elif asynchronous:
                self._loads[request.request_id] = ids
            else:
                self._waits_for.update(ids)
        self._try(self.side.allocated, None, request, blocks, loading)

    def news(self, output: Any) -> StepNews:
        """See SchedulerSide.news; what is owed by a side that is lost has failed."""
        failure = self.kv.manager.failure
        if failure is not None and not self.lost:
            self._lose(failure)
        news = self._try(self.side.news, None, output)
        if news is None:
            news = StepNews(self._step + 1)
            news.received, news.sent = set(self._loads), set(self._saves)
            news.failed = self._waits_for.union(*self._loads.values())
            news.failed_requests = {name for name, ids in self._loads.items() if not ids}
        self._waits_for = set()
        self._step = news.step
        self._told(news.received, news.sent)
        return news

    def outcome(self, output: Any) -> None:
        """See SchedulerSide.outcome."""
        if self.lost:  # blocks that did not come are still not to be found
            self.side.sync_loads.outcome(output.invalid_block_ids)
        self._try(self.side.outcome, None, output)
        self._told(output.finished_recving or (), output.finished_sending or ())

    def finished(self, request: Any, block_ids: Any) -> bool:
        """See SchedulerSide.finished."""
        self._answers.pop(request.request_id, None)
        held = self._try(self.side.finished, False, request, block_ids)
        if held:
            self._saves.add(request.request_id)
        return held

    def busy(self) -> bool:
        """See SchedulerSide.busy; and while vLLM is owed an end."""
        owing = bool(self._loads or self._saves)
        return owing or self._try(self.side.busy, False)

    def take_events(self) -> Iterable[Any]:
        """See SchedulerSide.take_events."""
        return self._try(self.side.take_events, ())

    def take_stats(self) -> Any:
        """See SchedulerSide.take_stats."""
        return self._try(self.side.take_stats, None)

    def reset(self) -> bool:
        """See SchedulerSide.reset. What is lost holds nothing."""
        return self._try(self.side.reset, True)

    def close(self) -> None:
        """Close the manager; not for longer than closing may take. Twice is fine."""
        closing = threading.Thread(target=self._close, name="flexkv-close", daemon=True)
        closing.start()
        closing.join(_GRACE_S if self.lost else self._close_s)
        if closing.is_alive():
            log.error("vllm.close_abandoned", lost=self.lost)

    # ---

    def _close(self) -> None:
        try:
            self.side.close()
        except Exception as error:
            log.error("vllm.close_failed", error=repr(error))

    def _try(self, verb: Callable[..., T], instead: T, *arguments: Any) -> T:
        if not self.lost:
            try:
                return verb(*arguments)
            except Exception as error:
                self._lose(error)
        return instead

    def _told(self, received: Iterable[str], sent: Iterable[str]) -> None:
        for name in received:
            self._loads.pop(name, None)
        self._saves.difference_update(sent)

    def _lose(self, error: BaseException) -> None:
        self.lost = True
        log.critical(
            "vllm.lost",
            error=repr(error),
            effect="flexkv loads and saves nothing any more; restart the engine to have it back",
            exc_info=None if isinstance(error, BrokenManagerError) else error,
        )
        try:
            self.side.abandon()
        except Exception as failure:
            log.error("vllm.abandon_failed", error=repr(failure))
