"""Those who use a manager in a world: the verbs of a story, and what each of them may expect.

`Users` (`put`, `get`, `prefetch`, `match`, `put_match`, `launch`, `cancel`, `leave`, ...): each
verb has a task that follows what it started and holds the result against what is right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from flexkv import KVManager
from flexkv.errors import CapacityError, ClosedError, StalledError, TransferError
from flexkv.testing.worlds.device import SPEC, TOKENS, Loan, Memory
from flexkv.testing.worlds.hardware import Fault, Hardware, Journal
from flexkv.testing.worlds.story import Path
from flexkv.testing.worlds.watch import Contents, Watch
from flexkv.transfer import GetResult, Plan, PutResult, Transfer

DEVICE_BLOCKS = 40
PATIENCE_S = 300.0  # virtual: whoever still waits then waits for ever
_EXPECTED = (CapacityError, ClosedError, TransferError)


class Users:
    """The users of one manager. `perfect`: nothing was lost yet, by a fault or a cancelled put."""

    kv: KVManager  # set when a life opens, as are the next ones
    hardware: Hardware
    contents: Contents

    def __init__(self, journal: Journal, *, perfect: bool) -> None:
        self.journal, self.perfect = journal, perfect
        self.memory = Memory(DEVICE_BLOCKS, journal)
        self.watch: Watch | None = None
        self.transfers: dict[int, Transfer] = {}
        self.plans: dict[int, tuple[Plan, Path, tuple[str, ...]]] = {}
        self._listeners: dict[int, asyncio.Task[None]] = {}
        self._followers: list[asyncio.Task[None]] = []

    # verbs

    def put(self, number: int, path: Path, namespace: tuple[str, ...], durable: bool) -> None:
        """Store a prompt; spoil its device blocks when that is allowed."""
        loan = self._lend_full(f"put #{number}", path, namespace)
        if loan is not None:
            transfer = self.kv.put_async(Contents.tokens(path), _slots(loan), namespace=namespace)
            self._follow(number, transfer, self._follow_put(number, transfer, loan, durable))

    def _lend_full(self, why: str, path: Path, namespace: tuple[str, ...]) -> Loan | None:
        contents = self.contents.of(path, namespace)
        loan = self.memory.lend(len(path), why, written=False)
        if loan is not None:
            for block, content in zip(loan.blocks, contents, strict=True):
                self.memory.write(block, content)
        return loan

    async def _follow_put(self, number: int, transfer: Transfer, loan: Loan, durable: bool) -> None:
        try:
            result: PutResult = await self._listen(number, transfer)
        except _EXPECTED as error:
            self.journal.write(f"#{number} put:", type(error).__name__)
            self._lost()
        except asyncio.CancelledError:
            self.journal.write(f"#{number} put: nobody listens")
        else:
            loan.give_back()  # at once: that is what the result promises
            self.journal.write(f"#{number} put: {result.stored} stored, {result.new} new")
            self._check_stored(transfer, result)
        if not await self._quiesced(number, transfer):
            return
        loan.give_back()
        if durable:
            try:
                await transfer.durable()
            except StalledError:
                self._stalled(f"#{number} put: durable")
            except _EXPECTED as error:
                self.journal.write(f"#{number} put: not durable, {type(error).__name__}")

    def _check_stored(self, transfer: Transfer, result: PutResult) -> None:
        short = result.stored < transfer.matched
        if result.cancelled or short:
            self._lost()
        if result.stored > transfer.matched or result.new > transfer.matched:
            self.journal.accuse("result", f"a put of {transfer.matched} tokens says {result}")

    def get(self, number: int, path: Path, namespace: tuple[str, ...]) -> None:
        """Load what is found of a prompt; compare it at once."""
        plan = self.kv.get_match(Contents.tokens(path), namespace=namespace)
        self._look_at(plan)
        self._launch_get(number, plan, path, namespace)

    def _launch_get(self, number: int, plan: Plan, path: Path, namespace: tuple[str, ...]) -> None:
        loan = self.memory.lend(plan.matched // TOKENS, f"get #{number}", written=True)
        if loan is None:
            plan.cancel()
            return
        try:
            transfer = self.kv.launch(plan, _slots(loan))
        except CapacityError:
            plan.cancel()
            loan.give_back()
            return
        wanted = self.contents.of(path, namespace)
        self._follow(number, transfer, self._follow_get(number, transfer, loan, wanted))

    async def _follow_get(
        self, number: int, transfer: Transfer, loan: Loan, wanted: list[bytes]
    ) -> None:
        try:
            result: GetResult = await self._listen(number, transfer)
        except ClosedError:
            self.journal.write(f"#{number} get: closed")
        except asyncio.CancelledError:
            self.journal.write(f"#{number} get: nobody listens")
        else:
            self.journal.write(f"#{number} get: {result.loaded} of {result.matched} loaded")
            failed = set(result.failed_device_blocks.tolist())
            self._check_loaded(number, result, loan, wanted, failed)
        if await self._quiesced(number, transfer):
            loan.give_back()

    async def _quiesced(self, number: int, transfer: Transfer) -> bool:
        """Wait until the device blocks may be used again; False if that is not to be seen."""
        try:
            await transfer.quiesced()
        except StalledError:
            self._stalled(f"#{number} {transfer.kind}: quiesced")
            return False
        return True

    def _stalled(self, who: str) -> None:
        """Somebody was told that hardware does not answer: is that so?"""
        self.journal.write(who, "gives up")
        if not self.hardware.stuck:
            self.journal.accuse("hang", f"{who} gives up, but all hardware answers")

    def _check_loaded(
        self, number: int, result: GetResult, loan: Loan, wanted: list[bytes], failed: set[int]
    ) -> None:
        for place, block in enumerate(loan.blocks):
            good = self.memory.read(block) == wanted[place]
            if block not in failed and not good:
                self.journal.accuse("bytes", f"get #{number}: device[{block}] holds wrong bytes")
            if block in failed and place < result.loaded // TOKENS:
                self.journal.accuse("result", f"get #{number}: loaded and failed overlap")
        if result.loaded < result.matched and self.perfect:
            self.journal.accuse("short", f"get #{number} fell short although nothing went wrong")

    def prefetch(self, number: int, path: Path, namespace: tuple[str, ...]) -> None:
        """Promote a prompt."""
        self.contents.of(path, namespace)
        transfer = self.kv.prefetch_async(Contents.tokens(path), namespace=namespace)
        self._follow(number, transfer, self._follow_prefetch(number, transfer))

    async def _follow_prefetch(self, number: int, transfer: Transfer) -> None:
        try:
            result: GetResult = await self._listen(number, transfer)
            self.journal.write(f"#{number} prefetch: {result.loaded} of {result.matched}")
        except (CapacityError, ClosedError) as error:
            self.journal.write(f"#{number} prefetch: {type(error).__name__}")
        except asyncio.CancelledError:
            self.journal.write(f"#{number} prefetch: nobody listens")

    def match(self, number: int, path: Path, namespace: tuple[str, ...]) -> None:
        """Match a prompt and keep the plan."""
        plan = self.kv.get_match(Contents.tokens(path), namespace=namespace)
        self._look_at(plan)
        self.plans[number] = (plan, path, namespace)

    def put_match(self, number: int, path: Path, namespace: tuple[str, ...]) -> None:
        """Take room for a prompt and keep the plan."""
        self.contents.of(path, namespace)
        try:
            plan = self.kv.put_match(Contents.tokens(path), namespace=namespace)
        except CapacityError:
            return
        self._lost()  # it may be too old before somebody launches it
        self.plans[number] = (plan, path, namespace)

    def _look_at(self, plan: Plan) -> None:
        assert self.watch is not None
        self.watch.look_at_match(plan.blocks.tolist())

    def launch(self, number: int, plan: int) -> None:
        """Launch a plan that was kept, if it is still open."""
        found = self.plans.pop(plan, None)
        if found is None or not found[0].open:
            return
        match, path, namespace = found
        if match.kind == "get":
            self._launch_get(number, match, path, namespace)
            return
        loan = self._lend_full(f"put #{number}", path, namespace)
        if loan is None:
            return
        try:
            transfer = self.kv.launch(match, _slots(loan))
        except CapacityError:
            loan.give_back()
            return
        self._follow(number, transfer, self._follow_put(number, transfer, loan, durable=False))

    def cancel_plan(self, plan: int) -> None:
        """Cancel a plan that was kept."""
        if plan in self.plans:
            self.plans.pop(plan)[0].cancel()

    def cancel(self, transfer: int) -> None:
        """Cancel a transfer."""
        if transfer in self.transfers and not self.transfers[transfer].done:
            self._lost()
            self.transfers[transfer].cancel()

    def leave(self, transfer: int) -> None:
        """Cancel the one who listens to a transfer."""
        if transfer in self._listeners:
            self._listeners[transfer].cancel()

    def remove(self, path: Path, namespace: tuple[str, ...]) -> None:
        """Forget a prompt."""
        self.kv.remove(Contents.tokens(path), namespace=namespace)

    def retain(self, path: Path, namespace: tuple[str, ...], hint: dict[str, Any]) -> None:
        """Say what a prompt is worth."""
        self.contents.of(path, namespace)
        kept = self.kv.retain(Contents.tokens(path), namespace=namespace, **hint)
        self.journal.write("retained" if kept else "not retained")

    def arm(self, fault: Fault) -> None:
        """Put a fault in force."""
        self._lost()
        self.hardware.faults.append(fault)

    async def whole(self, verb: str, wait: bool) -> None:
        """Flush or reset the whole cache, and wait for that or not."""
        work = self._whole(verb)
        if wait and not self.hardware.stuck:
            await self.patiently(verb, work)
        else:
            self._followers.append(asyncio.get_running_loop().create_task(work))

    async def _whole(self, verb: str) -> None:
        try:
            await getattr(self.kv, verb)()
        except StalledError:
            self._stalled(verb)
        except (CapacityError, ClosedError) as error:
            self.journal.write(f"{verb}:", type(error).__name__)

    def get_all(self, number: int, prompts: list[dict[str, Any]]) -> None:
        """Get some prompts, as after a restart."""
        for place, prompt in enumerate(prompts):
            self.get(number + place, **prompt)

    async def prove_room(self, number: int) -> None:
        """With nothing under way, a prompt as large as the host finds room, and is found then."""
        path = (number,) * self.kv.config.host_slots(SPEC)
        self.journal.write("a prompt that fills the host")
        self.put(number, path, (), durable=False)
        await self.patiently("a user", asyncio.wait([self._followers[-1]]))
        transfer = self.transfers[number]
        if transfer.outcome != "ok":
            self.journal.accuse("stuck", f"an idle host refuses a prompt: {transfer.outcome}")
        plan = self.kv.get_match(Contents.tokens(path))
        if plan.matched != transfer.matched:
            self.journal.accuse("stuck", "a prompt that was stored a moment ago is not found")
        plan.cancel()
        await self.settle()

    # following

    def _lost(self) -> None:
        """From here on blocks may be missing: by a fault, or because a put was cancelled."""
        self.perfect = False

    def _follow(self, number: int, transfer: Transfer, work: Coroutine[Any, Any, None]) -> None:
        self.transfers[number] = transfer
        self._followers.append(asyncio.get_running_loop().create_task(work))

    async def _listen(self, number: int, transfer: Transfer) -> Any:
        """Await a transfer in a task of its own, which may be cancelled."""

        async def listen() -> Any:
            return await transfer

        task = self._listeners[number] = asyncio.get_running_loop().create_task(listen())
        return await task

    async def patiently(self, who: str, work: Coroutine[Any, Any, Any]) -> Any:
        """Await something, but not for ever."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await work
        except TimeoutError:
            self.journal.accuse("hang", f"{who} still waits after {PATIENCE_S:g} s")

    # the end

    async def end_users(self) -> None:
        """Let all users go; raise what one of them ran into."""
        for task in [*self._listeners.values(), *self._followers]:
            if not task.done():
                task.cancel()
        if self._followers:
            await asyncio.wait(self._followers)
        for task in self._followers:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def settle(self) -> None:
        """Let everything come to its end, or to be given up where hardware never answers."""
        self.hardware.faults.clear()
        for number in list(self.plans):
            self.cancel_plan(number)
        for transfer in self.transfers.values():
            await self.patiently("a transfer", transfer.settled())
        for task in self._followers:
            await self.patiently("a user", asyncio.wait([task]))
        await self.patiently("flush", self._whole("flush"))
        if self.hardware.stuck:
            return
        assert self.watch is not None
        self.watch.look_idle()


def _slots(loan: Loan) -> list[int]:
    return [block * TOKENS + i for block in loan.blocks for i in range(TOKENS)]
