"""flexkv for callers without an event loop: one loop thread behind plain blocking calls.

`BlockingKVManager` has KVManager's verbs; each call runs on the loop thread and returns when it is
answered; `post` does not wait, `visit` makes a call between two things that the loop does.
`BlockingTransfer` wraps a handle: `result`, `done`, `durable`, `cancel`, `quiesced`.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, TypeVarTuple, Unpack

from flexkv.ahead import Groups, Namespace
from flexkv.config import FlexKVConfig
from flexkv.errors import ClosedError
from flexkv.events import EventStream
from flexkv.groups import WHOLE
from flexkv.manager import KVManager
from flexkv.protocols import Region
from flexkv.threads import Answer, SharedSelector
from flexkv.transfer import GetResult, Plan, PutResult, Transfer

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class BlockingTransfer:
    """A transfer seen from another thread."""

    __slots__ = ("_manager", "_transfer")

    def __init__(self, manager: BlockingKVManager, transfer: Transfer) -> None:
        self._manager, self._transfer = manager, transfer

    @property
    def matched(self) -> int:
        """Tokens the transfer was started for."""
        return self._transfer.matched

    @property
    def done(self) -> bool:
        """Whether the result is there."""
        return self._transfer.done

    def result(self, timeout_ms: float | None = None) -> GetResult | PutResult:
        """Wait for the result; TimeoutError when it takes longer (the transfer goes on)."""
        result: GetResult | PutResult = self._manager.run(
            self._transfer._listen, timeout_ms=timeout_ms
        )
        return result

    def durable(self, timeout_ms: float | None = None) -> PutResult:
        """Wait until the lowest tier holds a put; raises as Transfer.durable does."""
        return self._manager.run(self._transfer.durable, timeout_ms=timeout_ms)

    def quiesced(self, timeout_ms: float | None = None) -> None:
        """Wait until no byte can land any more."""
        self._manager.run(self._transfer.quiesced, timeout_ms=timeout_ms)

    def cancel(self) -> None:
        """Drop the work that has not started."""
        self._manager.call(self._transfer.cancel)


def _start(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> None:
    """Calls run as tasks, because what they start asks which loop it is on. None of them awaits
    anything, so that a task is over before somebody could drop it.
    """
    loop.create_task(work)


class _Loop(asyncio.SelectorEventLoop):
    """A loop that other threads reach without giving up the interpreter's lock (see threads.py)."""

    def __init__(self, shared: SharedSelector) -> None:
        super().__init__(shared)
        self._shared = shared

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """See asyncio; calls are made in the order in which all threads ask for them."""
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        context = contextvars.copy_context() if context is None else context
        handle = asyncio.Handle(callback, args, self, context)

        def make() -> None:
            if not handle.cancelled():
                self.call_soon(callback, *args, context=context)

        self._shared.leave(make)
        return handle


class BlockingKVManager:
    """KVManager for synchronous engines: `with BlockingKVManager(config) as kv`. Calls may come
    from any thread.
    """

    def __init__(self, config: FlexKVConfig | None = None, **overrides: Any) -> None:
        self._kv = KVManager(config, **overrides)
        self._shared = SharedSelector()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # nothing is handed to a loop that has been told to stop
        self._closing = threading.Lock()

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise ClosedError("a BlockingKVManager is entered once; make another one")
        self._loop = _Loop(self._shared)
        self._thread = threading.Thread(target=self._serve, name="flexkv-loop", daemon=True)
        self._thread.start()
        try:
            self.run(self._kv.__aenter__)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the manager and end the loop thread. Calling it twice, or from several threads, is
        fine. Calls of other threads that still wait end with what they waited for, or ClosedError.
        """
        with self._closing:
            if self._loop is None:
                return
            try:
                self.run(self._kv.aclose)
            finally:
                self._end()

    def _serve(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        loop = self._loop
        with self._shared.lock:
            loop.run_forever()
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_default_executor())

    def _end(self) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
        assert loop is not None
        assert self._thread is not None
        # a turn later: a task that is cancelled before its first step answers nobody
        loop.call_soon_threadsafe(loop.call_soon, loop.stop)
        self._thread.join()
        loop.close()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise ClosedError(
                "the manager is not open: use it inside `with BlockingKVManager(config) as kv`"
            )
        return self._loop

    def run(
        self,
        verb: Callable[..., Coroutine[Any, Any, _T]],
        *arguments: Any,
        timeout_ms: float | None = None,
    ) -> _T:
        """Run a coroutine function on the loop thread and wait for it.

        Raises:
            TimeoutError: it took longer than `timeout_ms`.
            ClosedError: the manager is not open, or was closed meanwhile.
        """
        with self._lock:
            loop = self._running_loop()
            future = asyncio.run_coroutine_threadsafe(verb(*arguments), loop)
        try:
            return future.result(None if timeout_ms is None else timeout_ms / 1e3)
        except TimeoutError:
            future.cancel()
            raise
        except CancelledError as error:
            raise ClosedError("the manager was closed while a call was waiting") from error

    def call(self, verb: Callable[..., _T], *arguments: Any, **keywords: Any) -> _T:
        """Run a plain call on the loop thread and return what it returns."""
        answer: Answer[_T] = Answer()
        self._begin(partial(answer.work_out, verb, arguments, keywords))
        return answer.wait()

    def visit(self, verb: Callable[..., _T], *arguments: Any, timeout_s: float = -1) -> _T:
        """Make a plain call on this thread, between two things that the loop thread does, without
        waking it: for questions (`get_match`) that a scheduler asks at every step. A loop that is
        never through is waited for until TimeoutError, with the default for ever.

        The call may not start anything on the loop: no transfers, no tasks.
        """
        self._running_loop()
        host, shared = self._kv._host, self._shared
        shared.enter(timeout_s)
        own, host.thread = host.thread, threading.get_ident()
        try:
            return verb(*arguments)
        finally:
            host.thread = own
            if shared.asleep:
                shared.wake()  # it has to look at its timers again
            shared.lock.release()

    def post(self, verb: Callable[..., object], *arguments: Any) -> None:
        """Have a plain call made on the loop thread soon, without waiting for it. Calls are made in
        the order of posting; what one raises is logged by the loop.
        """

        async def make() -> None:
            verb(*arguments)

        self._begin(make)

    def _begin(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a coroutine on the loop before that is told to stop, or not at all."""
        with self._lock:
            loop = self._running_loop()
            loop.call_soon_threadsafe(_start, loop, make())

    @property
    def manager(self) -> KVManager:
        """The manager itself, for what `call`, `post` and `run` execute on its thread."""
        return self._kv

    def register(self, kv_caches: Any, *, axes: str | None = None) -> Region:
        """See KVManager.register."""
        return self.call(self._kv.register, kv_caches, axes=axes)

    def get_match(
        self,
        tokens: Any,
        *,
        namespace: Namespace = None,
        computed_tokens: int = 0,
        leave_tokens: int = 0,
    ) -> Plan:
        """See KVManager.get_match. Cancel the plan with `cancel_plan`."""
        return self.call(
            self._kv.get_match,
            tokens,
            namespace=namespace,
            computed_tokens=computed_tokens,
            leave_tokens=leave_tokens,
        )

    def put_match(
        self, tokens: Any, *, namespace: Namespace = None, output_tokens: int | None = None
    ) -> Plan:
        """See KVManager.put_match."""
        given = {"namespace": namespace, "output_tokens": output_tokens}
        return self.call(self._kv.put_match, tokens, **given)

    def cancel_plan(self, plan: Plan) -> None:
        """Cancel a plan that was not launched."""
        self.call(plan.cancel)

    def launch(self, plan: Plan, slot_mapping: Any) -> BlockingTransfer:
        """See KVManager.launch."""
        return BlockingTransfer(self, self.call(self._kv.launch, plan, slot_mapping))

    def get(
        self, tokens: Any, slot_mapping: Any, *, namespace: Namespace = None
    ) -> BlockingTransfer:
        """See KVManager.get_async."""
        started = self.call(self._kv.get_async, tokens, slot_mapping, namespace=namespace)
        return BlockingTransfer(self, started)

    def put(
        self,
        tokens: Any,
        slot_mapping: Any,
        *,
        namespace: Namespace = None,
        output_tokens: int | None = None,
    ) -> BlockingTransfer:
        """See KVManager.put_async."""
        given = {"namespace": namespace, "output_tokens": output_tokens}
        return BlockingTransfer(self, self.call(self._kv.put_async, tokens, slot_mapping, **given))

    def prefetch(
        self, tokens: Any, *, namespace: Namespace = None, groups: Groups = WHOLE
    ) -> BlockingTransfer:
        """See KVManager.prefetch_async."""
        verb = self._kv.prefetch_async
        return BlockingTransfer(self, self.call(verb, tokens, namespace=namespace, groups=groups))

    def retain(self, tokens: Any, **hint: Any) -> bool:
        """See KVManager.retain."""
        return self.call(self._kv.retain, tokens, **hint)

    def computed(self, tokens: int, elapsed_ms: float, **more: Any) -> None:
        """See KVManager.computed."""
        self.call(self._kv.computed, tokens, elapsed_ms, **more)

    def wait(
        self, transfers: Iterable[BlockingTransfer], *, timeout_ms: float | None = None
    ) -> list[BlockingTransfer]:
        """Wait until all are done or the time is over; return those that are done."""
        listed = list(transfers)

        async def wait() -> None:
            await self._kv.wait([transfer._transfer for transfer in listed], timeout_ms=timeout_ms)

        self.run(wait)
        return [transfer for transfer in listed if transfer.done]

    def remove(self, tokens: Any, *, namespace: Namespace = None) -> int:
        """See KVManager.remove."""
        return self.call(self._kv.remove, tokens, namespace=namespace)

    def flush(self) -> None:
        """See KVManager.flush."""
        self.run(self._kv.flush)

    def reset(self) -> None:
        """See KVManager.reset."""
        self.run(self._kv.reset)

    def events(self) -> EventStream:
        """See KVManager.events; take what it has with `visit(stream.take)`."""
        return self.call(self._kv.events)

    def usage(self) -> dict[str, dict[str, int]]:
        """See KVManager.usage."""
        return self.call(self._kv.usage)
