"""The manager's own life: who holds it may be cancelled anywhere, may enter and leave in different
tasks, may forget to close; and when its machinery crashes, everybody is told and nothing hangs.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from loop_matrix import LOOPS, run_on
from rig import SPEC, STRIDE, Device, Rig, open_rig, prompt, slots_of
from stepping import Steps, open_stepping, registered

from flexkv import BrokenManagerError, ClosedError, FlexKVConfig, KVManager, plugins
from flexkv.model import BlockIds
from flexkv.policies.lru import LRU
from flexkv.protocols import PolicyContext

each_loop = pytest.mark.parametrize("loop", LOOPS)


def config(path: Path, **more: Any) -> FlexKVConfig:
    return FlexKVConfig.load(
        **(
            {
                "model": "test-model",
                "spec": SPEC,
                "host_cache_bytes": 8 * STRIDE,
                "disk_cache_bytes": 32 * STRIDE,
                "disk_dirs": [path / "d0"],
                "huge_pages": False,
                "chunk_bytes": 2 * STRIDE,
            }
            | more
        )
    )


async def no_host_left() -> bool:
    """Whether every hosted task has ended."""
    return not [task for task in asyncio.all_tasks() if task.get_name() == "flexkv-host"]


# the holder


@each_loop
@pytest.mark.parametrize("step", ["before open", "after open"])
def test_who_gives_up_entering_leaves_nothing_open(tmp_path: Path, step: str, loop: str) -> None:
    async def main() -> None:
        steps = Steps()
        with registered(steps):
            settings = config(tmp_path, disk_backend="stepping-disk")
            steps.arm(step)
            holder = asyncio.ensure_future(KVManager(settings).__aenter__())
            await steps.reached.wait()
            holder.cancel()
            steps.release()
            with pytest.raises(asyncio.CancelledError):
                await holder
            assert await no_host_left()
            steps.arm()
            async with KVManager(settings) as kv:  # the directory is free
                assert kv.usage()["disk"]["free"] == 32

    run_on(loop, main())


@each_loop
def test_a_holder_cancelled_at_any_step_closes_cleanly(tmp_path: Path, loop: str) -> None:
    """The task that holds `async with` is cancelled while its transfer stands at a step: the
    transfer ends, what was put is whole, and the directory can be opened again.
    """

    async def hold(steps: Steps, step: int) -> bool:
        name = 100 + step

        async def holder() -> None:
            async with KVManager(settings) as kv:
                rig = Rig(kv, Device())
                await rig.put(prompt(1, 4))
                steps.arm(step)
                transfer = rig.start_put(prompt(name, 6))
                await transfer.durable()
                await kv.get_async(prompt(1, 4), slots_of([50, 51, 52, 53]))

        settings = config(
            tmp_path,
            device="stepping",
            disk_backend="stepping-disk",
            inline_copy_bytes=0,
        )
        steps.arm()
        task = asyncio.ensure_future(holder())
        held = await steps.reached_or_done(task)
        if held:
            task.cancel()
        steps.release()
        try:
            await task
        except asyncio.CancelledError:
            assert held
        assert await no_host_left()
        return held

    async def main() -> None:
        steps = Steps()
        with registered(steps):
            step = 0
            while await hold(steps, step):
                step += 1
            assert step >= 8
        async with open_rig(tmp_path) as rig:
            assert (await rig.get(prompt(1, 4))).loaded == 16
            for name in range(step + 1):
                assert (await rig.get(prompt(100 + name, 6))).loaded in range(0, 25, 4)

    run_on(loop, main())


@each_loop
def test_a_close_that_is_cancelled_goes_on_by_itself(tmp_path: Path, loop: str) -> None:
    async def main() -> None:
        steps = Steps()
        with registered(steps):
            kv = KVManager(config(tmp_path, disk_backend="stepping-disk"))
            await kv.__aenter__()
            rig = Rig(kv, Device())
            steps.arm("before write")
            await rig.start_put(prompt(1, 4))
            await steps.reached.wait()
            closing = asyncio.ensure_future(kv.aclose())
            await asyncio.wait([closing], timeout=0.01)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            with pytest.raises(ClosedError):
                kv.get_match([1, 2, 3, 4])
            steps.release()
            await kv.aclose()
            assert await no_host_left()
        async with open_rig(tmp_path) as again:
            assert (await again.get(prompt(1, 4))).loaded == 16

    run_on(loop, main())


@each_loop
def test_entering_and_leaving_in_different_tasks(tmp_path: Path, loop: str) -> None:
    async def main() -> None:
        kv = KVManager(config(tmp_path))
        await asyncio.ensure_future(kv.__aenter__())
        rig = Rig(kv, Device())
        await asyncio.ensure_future(rig.put(prompt(1, 4)))
        await asyncio.ensure_future(kv.__aexit__(None, None, None))
        assert await no_host_left()

    run_on(loop, main())


@pytest_asyncio.fixture
async def shared_rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path) as rig:
        yield rig


@pytest.mark.parametrize("turn", [1, 2])
async def test_a_fixture_may_hold_the_manager(shared_rig: Rig, turn: int) -> None:
    await shared_rig.put(prompt(turn, 4))
    assert (await shared_rig.get(prompt(turn, 4))).loaded == 16


# closing in time


async def test_closing_gives_up_on_what_does_not_end(tmp_path: Path) -> None:
    """A store that never answers: closing ends after its time, and tells everybody who waits."""
    steps = Steps()
    with registered(steps):
        kv = KVManager(config(tmp_path, disk_backend="stepping-disk", close_timeout_ms=50))
        await kv.__aenter__()
        rig = Rig(kv, Device())
        steps.arm("before write")
        put = rig.start_put(prompt(1, 4))
        await put
        waiting = [
            asyncio.ensure_future(kv.flush()),
            asyncio.ensure_future(put.durable()),
            asyncio.ensure_future(kv.reset()),
        ]
        await steps.reached.wait()
        await kv.aclose()
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, Exception), outcome


async def test_quiesced_waits_for_copies_that_closing_gave_up_on(tmp_path: Path) -> None:
    async with open_stepping(tmp_path, close_timeout_ms=1) as (rig, steps):
        steps.arm("before gather")
        put = rig.start_put(prompt(1, 4))
        await steps.reached.wait()
        await rig.kv.aclose()
        assert put.done
        with pytest.raises(ClosedError):
            await put
        await put.quiesced()
        rig.closed = True


# crashes


class BrokenPolicyError(Exception):
    """What the policy of these tests raises."""


class Raising(LRU):
    """lru until it is told to raise."""

    raise_in = ""

    def open(self, context: PolicyContext) -> None:
        type(self).raise_in = ""
        super().open(context)

    def _check(self, verb: str) -> None:
        if self.raise_in == verb:
            raise BrokenPolicyError(verb)

    def inserted(self, blocks: BlockIds, now: float) -> None:
        self._check("inserted")
        super().inserted(blocks, now)

    def touched(self, blocks: BlockIds, now: float) -> None:
        self._check("touched")
        super().touched(blocks, now)

    def removed(self, blocks: BlockIds) -> None:
        self._check("removed")


def _crash_in(verb: str, rig: Rig) -> None:
    """Make one call into the brain raise."""
    Raising.raise_in = verb
    if verb == "touched":
        with pytest.raises(BrokenManagerError):
            rig.kv.get_async(prompt(1, 4), slots_of(range(4)))
    elif verb == "removed":
        with pytest.raises(BrokenManagerError):
            rig.kv.put_async(prompt(3, 4), slots_of(range(4)))
    else:
        rig.kv.put_async(prompt(4, 2), slots_of(range(2)))


@each_loop
@pytest.mark.parametrize("verb", ["inserted", "touched", "removed"])
def test_a_crash_is_told_to_everybody_and_nothing_hangs(
    tmp_path: Path, verb: str, loop: str
) -> None:
    async def main() -> None:
        with plugins.register(plugins.POLICIES, "raising", Raising):
            async with open_stepping(tmp_path, eviction_policy="raising") as (rig, steps):
                rig.closed = True
                await rig.put(prompt(1, 4))
                steps.arm("before gather")
                pending = rig.start_put(prompt(2, 2), first=20)
                await steps.reached.wait()
                waiting = [
                    asyncio.ensure_future(waiter)
                    for waiter in (
                        rig.kv.flush(),
                        pending.durable(),
                        pending.quiesced(),
                        rig.kv.wait([pending], timeout_ms=5000),
                        rig.kv.reset(),
                    )
                ]
                await asyncio.wait(waiting, timeout=0)
                rig.kv._host.resetting = False
                _crash_in(verb, rig)
                steps.release()
                outcomes = await asyncio.gather(*waiting, return_exceptions=True)
                assert isinstance(outcomes[0], BrokenManagerError)
                assert isinstance(outcomes[1], BrokenManagerError)
                assert outcomes[2] is None
                assert outcomes[3] == [pending]
                assert isinstance(outcomes[4], BrokenManagerError)
                with pytest.raises(BrokenManagerError) as caught:
                    await pending
                assert isinstance(caught.value.__cause__, BrokenPolicyError)
                for call in (rig.kv.usage, lambda: rig.kv.get_match([1, 2, 3, 4])):
                    with pytest.raises(BrokenManagerError):
                        call()
                with pytest.raises(BrokenManagerError):
                    await rig.kv.flush()

    with pytest.raises(BrokenManagerError):
        run_on(loop, main())


async def test_an_exception_of_the_body_is_not_replaced_by_the_crash(tmp_path: Path) -> None:
    async def body() -> None:
        async with KVManager(config(tmp_path, eviction_policy="raising")) as kv:
            rig = Rig(kv, Device())
            Raising.raise_in = "inserted"
            with pytest.raises(BrokenManagerError):
                await rig.start_put(prompt(1, 4))
            raise ZeroDivisionError

    with plugins.register(plugins.POLICIES, "raising", Raising), pytest.raises(ZeroDivisionError):
        await body()


# processes that end without closing

CHILD = textwrap.dedent(
    """
    import asyncio, sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from test_lifetime import config
    from rig import Device, Rig, prompt, slots_of
    from flexkv import KVManager

    async def main():
        kv = KVManager(config(Path({path!r}), inline_copy_bytes=0))
        await kv.__aenter__()
        rig = Rig(kv, Device())
        await rig.put(prompt(1, 6), durable=False)
        rig.transfers = [kv.get_async(prompt(1, 6), slots_of(range(6))) for _ in range(50)]
        rig.start_put(prompt(2, 8), first=20)
        return rig

    {ending}
    print("over")
    """
)
ENDINGS = {
    "asyncio.run": "rig = asyncio.run(main())",
    "loop closed": "loop = asyncio.new_event_loop(); rig = loop.run_until_complete(main())",
    "uvloop": "import uvloop; rig = uvloop.run(main())",
    "exception": "\n".join(
        [
            "async def fail():",
            "    rig = await main()",
            "    raise SystemExit(0)",
            "asyncio.run(fail())",
        ]
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_may_end_without_closing(tmp_path: Path, ending: str) -> None:
    code = CHILD.format(
        tests=str(Path(__file__).parent), path=str(tmp_path), ending=ENDINGS[ending]
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    if ending != "exception":
        assert "over" in done.stdout

    async def reopen() -> None:
        async with open_rig(tmp_path) as rig:
            assert (await rig.get(prompt(1, 6))).loaded in range(0, 25, 4)
            assert np.array_equal(rig.device.read(0), rig.device.read(0))

    asyncio.run(reopen())
