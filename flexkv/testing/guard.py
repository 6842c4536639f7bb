"""What every test of the kit shares: a loop, a limit of time, messages that name the contract.

`on_loop` (run an `async def` test, whatever pytest plug-ins are installed) - `require` (a violated
contract, in a sentence) - `within` (something must end in time) - `Ticker`, `longest_stall` (was
the loop kept from running) - `no_blocking_calls` - `leaves_nothing` (descriptors and threads).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import anyio
import pytest

import flexkv
import flexkv.testing
from flexkv.completion import Completions
from flexkv.testing.harness import Unsupported

T = TypeVar("T")
S = TypeVar("S", bound="KitTests")
P = ParamSpec("P")

_WHERE = 'flexkv/protocols.py, `{door}`; docs/plugins.md, "Verify it"'


class ContractError(AssertionError):
    """A plug-in broke a promise of its door; the message says which, and where it is written."""

    def __init__(self, door: str, what: str) -> None:
        super().__init__(f"{what}\n\nThe contract: {_WHERE.format(door=door)}")


class KitTests:
    """Base of all test classes of the kit.

    `limit_s` is how long one test may take, `loop_options` go to `anyio.run` as `backend_options`.
    """

    limit_s: float = 30.0
    loop_options: dict[str, Any] = {}  # noqa: RUF012 - overridden as a whole


def require(condition: object, door: str, what: str) -> None:
    """Raise ContractError unless `condition` holds. `door` is "Class.verb" of flexkv.protocols."""
    __tracebackhide__ = True
    if not condition:
        raise ContractError(door, what)


@contextlib.contextmanager
def refused(kinds: type[Exception] | tuple[type[Exception], ...], door: str, what: str) -> Any:
    """Expect one of the errors `kinds`; `what` says what must be refused."""
    __tracebackhide__ = True
    names = " or ".join(k.__name__ for k in (kinds if isinstance(kinds, tuple) else (kinds,)))
    try:
        yield
    except kinds:
        return
    except Exception as error:
        raise ContractError(
            door, f"{what} must be refused with {names}, not with {error!r}"
        ) from error
    raise ContractError(door, f"{what} must be refused with {names}, but was accepted")


def on_loop(
    test: Callable[Concatenate[S, P], Coroutine[Any, Any, None]],
) -> Callable[Concatenate[S, P], None]:
    """Make an `async def` test one that runs on a new event loop, and ends within `limit_s`."""

    @functools.wraps(test)
    def run(self: S, *args: P.args, **kwargs: P.kwargs) -> None:
        __tracebackhide__ = True

        async def main() -> None:
            with anyio.move_on_after(self.limit_s) as scope:
                try:
                    await test(self, *args, **kwargs)
                except Unsupported as reason:
                    pytest.skip(str(reason))
                except BaseExceptionGroup as several:
                    lacking, rest = several.split(Unsupported)
                    if lacking is not None and rest is None:
                        pytest.skip(str(_first(lacking)))
                    told, _ = several.split(ContractError)
                    if told is None:
                        raise
                    raise _first(told) from None
            if scope.cancelled_caught:
                raise AssertionError(
                    f"not over after {self.limit_s:g} s: something waits for a completion that "
                    "does not come"
                )

        anyio.run(main, backend_options=self.loop_options)

    return cast("Callable[Concatenate[S, P], None]", run)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


async def within(limit_s: float, work: Awaitable[T], door: str, what: str) -> T:
    """Await `work`; raise ContractError when it takes longer than `limit_s`."""
    __tracebackhide__ = True
    with anyio.move_on_after(limit_s) as scope:
        return await work
    assert scope.cancelled_caught
    raise ContractError(door, f"{what} (not over after {limit_s:g} s)")


class Ticker:
    """Runs every millisecond, and remembers the longest time that it was kept from running."""

    def __init__(self) -> None:
        self.worst_ms = 0.0
        self._loop = asyncio.get_running_loop()
        self._due = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Tick from now on."""
        self._due = time.perf_counter() + 0.001
        self._handle = self._loop.call_later(0.001, self._tick)

    def _tick(self) -> None:
        self._note()
        self.start()

    def _note(self) -> None:
        self.worst_ms = max(self.worst_ms, (time.perf_counter() - self._due) * 1e3)

    def stop(self) -> None:
        """Tick no more; a tick that is overdue counts."""
        self._note()
        if self._handle is not None:
            self._handle.cancel()


@contextlib.contextmanager
def ticking() -> Iterator[Ticker]:
    """A ticker that runs while the context lasts."""
    ticker = Ticker()
    ticker.start()
    try:
        yield ticker
    finally:
        ticker.stop()


async def longest_stall(work: Callable[[], Awaitable[object]], attempts: int = 5) -> float:
    """How long (ms) `work` keeps the loop from running, if for most of its duration, every time.

    A busy machine delays single ticks; only a call that blocks does so in all attempts. Stalls
    below 2 ms, or below half the duration, are 0.
    """
    least = float("inf")
    for _ in range(attempts):
        started = time.perf_counter()
        with ticking() as ticker:
            await work()
        duration_ms = (time.perf_counter() - started) * 1e3
        blocked = ticker.worst_ms if ticker.worst_ms > max(2.0, duration_ms / 2) else 0.0
        if not (least := min(least, blocked)):
            break
    return least


@contextlib.contextmanager
def no_blocking_calls(plugin: Any, door: str) -> Iterator[None]:
    """Require that neither flexkv nor the package of `plugin` makes a blocking call on the loop.

    File, socket and lock calls and sleeps are seen where blockbuster is installed.
    """
    try:
        from blockbuster import BlockingError, blockbuster_ctx
    except ImportError:
        raise Unsupported("install blockbuster to see blocking calls") from None
    package = sys.modules.get(getattr(plugin, "__module__", "flexkv").partition(".")[0], flexkv)
    watched = [_where_it_is(flexkv), _where_it_is(package)]
    with blockbuster_ctx(watched, excluded_modules=[_where_it_is(flexkv.testing)]) as guard:
        for name in ("io.TextIOWrapper.write", "io.BufferedWriter.write"):
            guard.functions[name].deactivate()  # the log
        try:
            yield
        except BlockingError as error:
            raise ContractError(door, f"{error} on the event loop: use a thread") from error


def _where_it_is(module: ModuleType) -> ModuleType:
    """The module, or its folder: an editable install has another one in front."""
    if not hasattr(module, "__path__") or module.__file__ is None:
        return module
    folder = ModuleType(module.__name__)
    folder.__path__ = [os.path.dirname(module.__file__)]
    return folder


async def leaves_nothing(
    once: Callable[[], Awaitable[None]], door: str, pool_threads: int = 0
) -> None:
    """Require that opening and closing, as `once` does, leaves no descriptor and no thread, but for
    the `pool_threads` that a library may keep.
    """
    __tracebackhide__ = True

    def leftovers() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    await once()  # libraries load, pools start
    before = leftovers()
    for _ in range(5):
        await once()
    after = leftovers()
    spare = (5, 5 + pool_threads)
    grown = (new - old for old, new in zip(before, after, strict=True))
    require(
        all(more < limit for more, limit in zip(grown, spare, strict=True)),
        door,
        f"(descriptors, threads) grew from {before} to {after} over 5 times open and close",
    )


async def give_up(
    work: Coroutine[Any, Any, object], after_s: float, limit_s: float, door: str
) -> None:
    """Await `work` for a while, then stop to: it must let its caller go at once."""
    __tracebackhide__ = True
    task = asyncio.create_task(work)
    await asyncio.wait([task], timeout=after_s)
    task.cancel()
    await asyncio.wait([task], timeout=limit_s)
    require(
        task.done(),
        door,
        "a caller that was cancelled, or whose deadline passed, is kept for more than "
        f"{limit_s:g} s: let it go, and let close wait for the hardware",
    )


def tickets_are_back(completions: Completions, door: str) -> None:
    """Require that each ticket that was taken was completed, and once."""
    __tracebackhide__ = True
    require(
        completions.in_flight == 0,
        door,
        f"{completions.in_flight} tickets are still out although the backend is closed: a "
        "completion is missing, or close did not wait for it",
    )
    require(
        completions.stale == 0,
        door,
        f"{completions.stale} completions came for tickets that were complete: each part completes "
        "once",
    )
