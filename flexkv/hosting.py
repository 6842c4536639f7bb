"""Who owns the work: the hosted task group of a manager, its transfers, and how it ends.

`Host.serve` (the one task that holds the group) - `carry` (run a transfer to its end), `save`,
`admit` - `wait`, `flush`, `reset` - `stop`. A crash in the manager's own work makes it broken:
every pending and later handle raises BrokenManagerError from the cause.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

import anyio
import anyio.abc
import numpy as np
from numpy.typing import NDArray

from flexkv.admission import Admission
from flexkv.carriers import Carriers
from flexkv.cluster.lender import Promote
from flexkv.config import FlexKVConfig
from flexkv.engine import Run
from flexkv.errors import BrokenManagerError, CapacityError, ClosedError, FlexKVError
from flexkv.model import Copy, Statuses, TransferGraph
from flexkv.request import Request
from flexkv.stack import Stack, build
from flexkv.telemetry import Telemetry, log
from flexkv.transfer import Transfer
from flexkv.waiting import Deadlines, Signal, in_time

P = ParamSpec("P")
T = TypeVar("T")


class Host:
    """Lifetime of a manager: opening, the task group in one hosted task, closing, breaking."""

    def __init__(self, config: FlexKVConfig, telemetry: Telemetry, bring: Promote) -> None:
        self._config, self._telemetry, self._bring = config, telemetry, bring
        self.thread = threading.get_ident()
        self._stack: Stack | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self.failure: BaseException | None = None
        self.opened, self._stop, self.closed = anyio.Event(), anyio.Event(), anyio.Event()
        self._closing = self._cut_short = self.resetting = False
        self._saves: set[Run] = set()
        self._ended = Signal()
        self.transfers: dict[Transfer, None] = {}  # in the order of their start
        self._deadlines: Deadlines[Request]
        self._carriers: Carriers[Request]
        self._admission = Admission(config)
        self.admit, self.spare = self._admission.check, self._admission.spare

    # state

    def stack(self) -> Stack:
        """The open parts.

        Raises:
            ClosedError, BrokenManagerError: the manager is not usable.
        """
        if threading.get_ident() != self.thread:
            raise FlexKVError(
                "a KVManager belongs to the thread of its event loop; "
                "from other threads use flexkv.BlockingKVManager"
            )
        if self._stack is None or self._closing or self.failure is not None:
            self.check()
            raise ClosedError(
                "the manager is not open: use it inside `async with KVManager(config) as kv`"
            )
        return self._stack

    def check(self) -> None:
        """Raise BrokenManagerError from the cause if the manager has crashed."""
        if self.failure is not None:
            raise self._broken()

    def _broken(self) -> BrokenManagerError:
        error = BrokenManagerError(f"the manager crashed and must be reopened: {self.failure!r}")
        error.__cause__ = self.failure
        return error

    def think(self, verb: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
        """Ask the brain. If it raises what it should not, the manager is broken: its books are."""
        try:
            return verb(*arguments, **keywords)
        except FlexKVError:
            raise
        except Exception as error:
            self._break(error)
            raise self._broken() from error

    # the hosted task

    async def serve(self) -> None:
        """Open, hold the task group until `stop`, close. Runs in a task of its own, so that the
        group is entered and left by the same task whoever enters and leaves the manager.
        """
        self.thread = threading.get_ident()
        try:
            try:
                stack = await build(self._config, self._telemetry, self._commit)
            except Exception as error:
                self.failure = error  # nothing was open: the one who enters is told, nobody else
                return
            self._stack = stack
            self._deadlines = Deadlines(
                stack.completions, self._config.transfer_timeout_ms / 1e3, self._time_out
            )
            stack.observe(self._telemetry)
            for kind in self._admission.kinds:
                reading = partial(self._admission.entered, kind)
                self._telemetry.gauge("transfers_in_flight", reading, kind=kind)
            async with anyio.create_task_group() as group:
                self._group = group
                self._carriers = Carriers(group, self._carry)
                for _ in range(stack.spiller.workers):
                    group.start_soon(stack.spiller.run)
                group.start_soon(stack.discarder.run)
                group.start_soon(stack.take_part, self._bring, self.reset)
                self.opened.set()
                await self._stop.wait()
                await self._drain(stack)
                group.cancel_scope.cancel()
        except Exception as error:
            self._break(_only(error))
        finally:
            self._closing = True
            with anyio.CancelScope(shield=True):
                await self._release()
            self.opened.set()
            self.closed.set()

    async def entered(self) -> None:
        """Wait until the manager is open; raise what kept it from opening. Who gives up waiting
        leaves nothing open behind.
        """
        try:
            await self.opened.wait()
        except BaseException:
            self.stop()
            with anyio.CancelScope(shield=True):
                await self.closed.wait()
            raise
        if self.failure is not None:
            await self.closed.wait()
            raise self.failure

    def stop(self) -> None:
        """Begin to close: no new calls, open plans are cancelled."""
        if self._stack is not None:
            self._stack.plans.cancel_all()
        self._closing = True
        self._stop.set()

    async def _drain(self, stack: Stack) -> None:
        """Let transfers, spills and discards finish, within close_timeout_ms."""
        with anyio.move_on_after(self._config.close_timeout_ms / 1e3) as scope:
            await self._settle(stack)
        if scope.cancelled_caught:
            self._cut_short = True
            log.error(
                "close.timeout", transfers=len(self.transfers), spills=stack.spiller.queued_blocks
            )

    async def _settle(self, stack: Stack) -> None:
        await stack.unlent()
        while self.transfers or self._saves:
            await self._ended.wait()
        await stack.spiller.drained()
        await stack.discarder.drained()

    async def _release(self) -> None:
        given_up = list(self.transfers)
        for transfer in given_up:
            transfer.fail(
                self._broken() if self.failure else ClosedError("the manager was closed meanwhile")
            )
        self.transfers.clear()
        self._ended.raise_()
        stack, self._stack = self._stack, None
        if stack is not None:
            self._deadlines.clear()
            stack.spiller.stop()
            stack.discarder.stop()
            self._telemetry.retire()
            await stack.aclose()
        for transfer in given_up:  # not before: until then their copies may still be under way
            transfer.quiesce()

    def _break(self, error: BaseException) -> None:
        """Record the crash, tell everybody who waits, stop."""
        if self.failure is not None:
            return
        self.failure = error
        log.critical("manager.broken", error=repr(error), exc_info=error)
        for transfer in list(self.transfers):
            transfer.fail(self._broken())
        if self._stack is not None:
            self._stack.spiller.stop()
            self._stack.discarder.stop()
        self._ended.raise_()
        self._stop.set()
        if self._group is not None:
            self._group.cancel_scope.cancel()

    # transfers

    def carry(self, request: Request) -> None:
        """Run a request in the group; settle it at its end or at its deadline, whichever comes
        first.
        """
        self._pass_on(self.stack())
        if not request.run.ops:
            request.conclude()
            self._finish(request)
            return
        transfer = request.transfer
        self.transfers[transfer] = None
        self._admission.enter(request.kind)
        self._deadlines.add(request)
        self._carriers.start(request)

    async def _carry(self, request: Request) -> None:
        try:
            await self._admission.begin(request.kind)
            try:
                assert self._stack is not None
                await self._stack.engine.run(request.run)
            finally:
                self._admission.end(request.kind)
            request.conclude()
            self._finish(request)
        except Exception as error:
            self._break(_only(error))

    def _time_out(self, request: Request) -> None:
        log.warning("transfer.timeout", kind=request.kind, blocks=len(request.run.graph.blocks))
        self._telemetry.add("timed_out_transfers", 1, kind=request.kind)
        request.run.cancel()
        request.conclude(timed_out=True)

    def _finish(self, request: Request) -> None:
        """Drop the pins; nothing of the request is in flight any more."""
        assert self._stack is not None
        transfer = request.transfer
        self._deadlines.remove(request)
        self._stack.planner.release(request.run.graph.blocks)
        if transfer in self.transfers:
            del self.transfers[transfer]
            self._admission.leave(request.kind)
        transfer.quiesce()
        request.report()
        self._ended.raise_()

    def _commit(
        self, graph: TransferGraph, op: Copy, positions: NDArray[np.int64], statuses: Statuses
    ) -> None:
        """Book what the engine achieved, and pass on the work that follows from it."""
        stack = self._stack
        assert stack is not None
        stack.ledger.commit(graph, op, positions, statuses, stack.completions.now())
        self._pass_on(stack)

    def _pass_on(self, stack: Stack) -> None:
        """Hand the work that the ledger has collected to those who do it."""
        stack.spiller.landed()
        for blocks, keys in stack.ledger.spills:
            stack.spiller.offer(blocks, keys)
        stack.ledger.spills.clear()
        stack.discarder.wake()

    def save(self, graph: TransferGraph) -> None:
        """Start to save victims whose host slots are about to be written again."""
        stack = self.stack()
        run = stack.engine.start(graph)
        self._saves.add(run)
        assert self._group is not None
        self._group.start_soon(self._save, run)

    async def _save(self, run: Run) -> None:
        try:
            assert self._stack is not None
            await self._stack.engine.run(run)
            self._stack.planner.release(run.graph.blocks)
        except Exception as error:
            self._break(_only(error))
        finally:
            self._saves.discard(run)
            self._ended.raise_()
            if self._stack is not None:
                self._stack.spiller.progress.raise_()

    # waiting

    async def wait(self, transfers: list[Transfer], timeout_ms: float | None) -> list[Transfer]:
        """Wait until all are done or the time is over; return those that are done."""
        with anyio.move_on_after(None if timeout_ms is None else timeout_ms / 1e3):
            for transfer in transfers:
                if not transfer.done:
                    await transfer.settled()
        return [transfer for transfer in transfers if transfer.done]

    async def flush(self) -> None:
        """Wait until the transfers, spills and discards that are under way now are over."""
        stack, saves = self.stack(), set(self._saves)
        with in_time(self._config.settle_timeout_ms, "not everything is written"):
            for transfer in list(self.transfers):
                await transfer.quiesced(math.inf)
            while saves & self._saves:
                await self._ended.wait()
            await stack.spiller.caught_up()
            await stack.discarder.caught_up()
        self.check()
        if self._cut_short:
            raise ClosedError("the manager was closed before everything was written")

    async def reset(self) -> None:
        """Forget everything: plans are cancelled, transfers finish, then index, pools and stores
        are emptied.
        """
        stack = self.stack()
        if self.resetting:
            raise CapacityError("a reset is running already")
        self.resetting = True
        try:
            stack.plans.cancel_all()
            with in_time(self._config.settle_timeout_ms, "not everything is forgotten"):
                while True:
                    await self._settle(stack)
                    if not self.stack().spiller.busy:  # nobody asked for durability meanwhile
                        break
                stack.ledger.forget_everything()
                stack.discarder.wake()
                await stack.discarder.drained()
        finally:
            self.resetting = False
            stack.lend()


def _only(error: BaseException) -> BaseException:
    """The one error inside nested groups of one, or the group."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
