"""Nodes that die, stop and come back, with leases in their hands: no wrong byte, no hang, no pin
that stays. The others are processes of their own, killed and stopped by signals.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import numpy as np
from anyio.streams.text import TextReceiveStream, TextSendStream
from peer_child import BLOCKS
from peer_rig import Known, open_owner, open_reader
from rig import prompt

from flexkv.cluster.fetching import PeerSettings
from flexkv.cluster.holdings import DISK_MEDIUM
from flexkv.cluster.peerlink import Grant
from flexkv.model import FAILED, LANDED, SlotIds, Statuses

TOKENS = prompt(1, BLOCKS)
ALL = range(BLOCKS)
PATIENT = PeerSettings(timeout_ms=20_000, failures=100)
BRIEF = PeerSettings(timeout_ms=500, failures=100)


class Child:
    """A process of peer_child.py."""

    def __init__(self, process: anyio.abc.Process) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        self.process = process
        self._said, self._tell = TextReceiveStream(process.stdout), TextSendStream(process.stdin)
        self._text = ""

    async def hear(self, what: str) -> dict[str, Any]:
        """Wait until it says `what`."""
        with anyio.fail_after(90):
            while "\n" not in self._text:
                self._text += await self._said.receive()
        line, _, self._text = self._text.partition("\n")
        said: dict[str, Any] = json.loads(line)
        assert said["what"] == what
        return said

    async def unpinned(self) -> None:
        """Wait until it holds nothing for anybody."""
        await self._tell.send("\n")
        await self.hear("unpinned")

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def child(*arguments: str) -> AsyncIterator[Child]:
    """Run peer_child.py; it is killed at the end."""
    program = Path(__file__).with_name("peer_child.py")
    command = [sys.executable, str(program), *arguments]
    env = {**os.environ, "PYTHONPATH": str(program.parent.parent)}
    pipe = subprocess.PIPE
    process = await anyio.open_process(command, stdin=pipe, stdout=pipe, stderr=None, env=env)
    async with process:
        try:
            yield Child(process)
        finally:
            if process.returncode is None:
                process.kill()


@asynccontextmanager
async def owner_child(known: Known, fault: str = "none", ttl_s: float = 10) -> AsyncIterator[Child]:
    """An owner in a process of its own: node 0, and the first to be asked."""
    async with child("owner", fault, str(ttl_s)) as owner:
        known.add(0, (await owner.hear("ready"))["address"])
        known.hold(ALL, 0)
        yield owner


async def test_an_owner_killed_before_it_is_asked_costs_a_failure() -> None:
    known = Known()
    async with open_reader(known, settings=PATIENT) as reader, owner_child(known) as owner:
        assert (await reader.read(TOKENS)).tolist() == [LANDED] * BLOCKS
        await owner.kill()
        with anyio.fail_after(60):  # over the connection that it left, and a new one
            assert (await reader.read(TOKENS)).tolist() == [FAILED] * BLOCKS
        assert known.losses == []


async def test_when_an_owner_is_killed_with_the_lease_the_next_holder_is_asked() -> None:
    known = Known()
    async with (
        open_owner(known=known, node=1) as second,
        open_reader(known, settings=PATIENT) as reader,
        owner_child(known, "stalls") as first,
        anyio.create_task_group() as group,
    ):
        await second.rig.put(TOKENS)
        known.hold(ALL, 1, DISK_MEDIUM)

        async def kill() -> None:
            await first.hear("leased")
            await first.kill()

        group.start_soon(kill)
        assert (await reader.read(TOKENS)).tolist() == [LANDED] * BLOCKS
        assert second.server.sent_blocks == BLOCKS
        await second.unpinned()


async def test_when_an_owner_is_killed_while_it_sends_the_rest_comes_from_the_next() -> None:
    known = Known()
    async with (
        open_owner(known=known, node=1) as second,
        open_reader(known, settings=PATIENT) as reader,
        owner_child(known, "half") as first,
        anyio.create_task_group() as group,
    ):
        await second.rig.put(TOKENS)
        known.hold(ALL, 1, DISK_MEDIUM)

        async def kill() -> None:
            await first.hear("half")
            await first.kill()

        group.start_soon(kill)
        assert (await reader.read(TOKENS)).tolist() == [LANDED] * BLOCKS
        assert second.server.sent_blocks < BLOCKS  # what had come was good
        await second.unpinned()


class Doomed:
    """A courier whose owner dies while it pulls."""

    name = "doomed"

    def __init__(self, owner: Child) -> None:
        self._owner = owner

    async def fetch(self, address: str, grant: Grant, offsets: Any, slots: SlotIds) -> Statuses:
        await self._owner.kill()
        return np.full(len(slots), FAILED, np.uint8)

    async def aclose(self) -> None:
        pass


async def test_an_owner_killed_after_the_lease_was_given_costs_a_failure() -> None:
    known = Known()
    async with owner_child(known) as owner:
        known.addresses[0, "doomed"] = "somewhere"
        courier = Doomed(owner)
        async with open_reader(known, settings=PATIENT, courier=lambda arena: courier) as reader:
            with anyio.fail_after(60):
                assert (await reader.read(TOKENS)).tolist() == [FAILED] * BLOCKS


async def test_an_owner_that_stopped_is_late_and_lends_again_when_it_goes_on() -> None:
    """It stops in the middle of sending; what it then held is not pinned when it goes on."""
    known = Known()
    async with open_reader(known, settings=BRIEF) as reader, owner_child(known, "half", 1) as owner:

        async def stop() -> None:
            await owner.hear("half")
            owner.stop()

        async with anyio.create_task_group() as group:
            group.start_soon(stop)
            statuses = (await reader.read(TOKENS)).tolist()
        assert set(statuses) <= {LANDED, FAILED}
        assert FAILED in statuses
        with anyio.fail_after(60):
            assert (await reader.read(TOKENS)).tolist() == [FAILED] * BLOCKS
        owner.resume()
        with anyio.fail_after(90):
            while (await reader.read(TOKENS)).tolist() != [LANDED] * BLOCKS:
                pass
            await owner.unpinned()
        assert known.losses == []


async def test_the_leases_of_a_reader_that_is_killed_expire() -> None:
    async with open_owner(ttl_s=0.5) as owner:
        await owner.rig.put(TOKENS)
        async with child("reader", owner.address) as reader:
            assert (await reader.hear("leased"))["blocks"] == BLOCKS
            await reader.kill()
        await owner.unpinned()
        assert owner.lender.leases.expired == 1
