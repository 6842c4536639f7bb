"""What stands between vLLM's scheduler and flexkv's: no failure of flexkv gets past `Guard`.

`arrived`, `matched_tokens`, `allocated`, `news`, `outcome`, `finished`, `take_events`,
`take_stats`, `reset`, `close`: the verbs of `SchedulerSide` - `bind` (vLLM's block pool) - `lost`.

It knows by itself which requests vLLM holds back for the sake of a load or save. Once flexkv has
failed, or has owed an end for too long, it is lost: the workers are parted from, so that no byte
can land any more, what is owed is reported as failed, and nothing is asked of it again. vLLM goes
on without it: no hits, no saves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from flexkv.errors import BrokenManagerError
from flexkv.integration.vllm.messages import StepNews
from flexkv.integration.vllm.scheduler import SchedulerSide
from flexkv.telemetry import log

T = TypeVar("T")
_GRACE_S = 2.0


class Guard:
    """Answers for one SchedulerSide, whatever becomes of it.

    Args:
        patience_s: how long an end may be owed; more than any transfer takes by its own deadline.
    """

    def __init__(self, side: SchedulerSide, patience_s: float | None = None) -> None:
        self.side, self.kv, self.lost = side, side.kv, False
        config = side.kv.manager.config
        self._close_s = config.close_timeout_ms / 1e3 + _GRACE_S
        self._patience_s = patience_s or config.transfer_timeout_ms / 1e3 + _GRACE_S
        self._size = config.tokens_per_block
        self._asked: dict[str, int] = {}  # request -> computed tokens when it was asked for last
        self._loads: dict[str, tuple[list[int], float]] = {}  # request -> blocks, since when
        self._saves: dict[str, float] = {}
        self._waits_itself: set[int] = set()  # blocks that this step's forward pass waits for
        self._step = 0
        self._silent_since: float | None = None
        self._pool: Any = None
        self._admitted: set[int] = set()
        self._in_step: set[int] = set()

    def bind(self, pool: Any) -> None:
        """Take vLLM's block pool, whose prefix cache must forget blocks that did not arrive."""
        self._pool = pool

    # --- vLLM's scheduler

    def arrived(self, request: Any) -> None:
        """See SchedulerSide.arrived."""
        self._try(self.side.arrived, None, request)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """See SchedulerSide.matched_tokens; nothing while the manager does not answer."""
        self._asked[request.request_id] = computed
        if self._silent_since is not None:
            return 0, False
        return self._try(self.side.matched_tokens, (0, False), request, computed)

    def allocated(self, request: Any, blocks: Any, loading: int) -> None:
        """See SchedulerSide.allocated."""
        ids = blocks.get_block_ids()
        self._admitted.update(*ids)
        computed = self._asked.pop(request.request_id, 0)
        if loading:
            first = computed // self._size
            ids = list(ids[0][first : first + loading // self._size])
            if self.side.asynchronous:
                self._loads[request.request_id] = ids, time.monotonic()
            else:
                self._waits_itself.update(ids)
        self._try(self.side.allocated, None, request, blocks, loading)

    def news(self, output: Any) -> StepNews:
        """See SchedulerSide.news."""
        self._look()
        self._in_step, self._admitted = self._admitted, set()
        news = self._try(self.side.news, None, output)
        if news is None:
            news = StepNews(self._step + 1)
            news.received, news.sent = set(self._loads), set(self._saves)
            news.failed = self._waits_itself.union(*(ids for ids, _ in self._loads.values()))
        self._waits_itself = set()
        self._step = news.step
        self._told(news.received, news.sent)
        return news

    def outcome(self, output: Any) -> None:
        """See SchedulerSide.outcome.

        Blocks that a step waited for are in vLLM's prefix cache before they are there. If they do
        not come, their request computes them; but when it is aborted or preempted before that, who
        finds them next would read what was there before. So they are found no more, and neither is
        what was computed behind them.
        """
        if output.invalid_block_ids and self._pool is not None and not self.side.asynchronous:
            self._pool.evict_blocks(self._in_step | output.invalid_block_ids)
        self._try(self.side.outcome, None, output)
        self._told(output.finished_recving or (), output.finished_sending or ())

    def finished(self, request: Any, block_ids: Any) -> bool:
        """See SchedulerSide.finished."""
        self._asked.pop(request.request_id, None)
        held = self._try(self.side.finished, False, request, block_ids)
        if held:
            self._saves[request.request_id] = time.monotonic()
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
        if self.lost:
            return instead
        try:
            return verb(*arguments)
        except TimeoutError:
            self._wait_for_sign()
        except Exception as error:
            self._lose(error)
        return instead

    def _told(self, received: Iterable[str], sent: Iterable[str]) -> None:
        for name in received:
            self._loads.pop(name, None)
            self._saves.pop(name, None)
        for name in sent:
            self._saves.pop(name, None)

    def _wait_for_sign(self) -> None:
        """The manager is busy: ask it nothing before it has given a sign of life."""
        if self._silent_since is None:
            log.warning("vllm.silent", effect="no hits until the manager answers")
            self._silent_since = time.monotonic()
            self._try(self.side.kv.post, None, self._give_sign)

    def _give_sign(self) -> None:
        self._silent_since = None

    def _look(self) -> None:
        """Give up on what should have ended long ago."""
        if self.lost:
            return
        starts = [since for _, since in self._loads.values()]
        starts += self._saves.values()
        if self._silent_since is not None:
            starts.append(self._silent_since)
        if starts and time.monotonic() - min(starts) > self._patience_s:
            self._lose(TimeoutError(f"it has not answered for {self._patience_s:.0f} s"))
        elif failure := self.kv.manager.failure:
            self._lose(failure)

    def _lose(self, error: BaseException) -> None:
        self.lost = True
        log.critical(
            "vllm.lost",
            error=repr(error),
            effect="flexkv loads and saves nothing any more; restart the engine to have it back",
            exc_info=None if isinstance(error, (BrokenManagerError, TimeoutError)) else error,
        )
        try:
            self.side.abandon()
        except Exception as failure:
            log.error("vllm.abandon_failed", error=repr(failure))
