"""Managers in processes that get killed: `Zygote` (their warm parent, seen from a test), `universe`
(the prompts they use), `Story` (what follows from what a child said before it died).

Run as a program it reads one job per line from stdin (JSON), forks, says ["pid", n], waits for the
child's end and says ["dead"]. What a child says is one write of one line: whole or absent. The
child of mode "random" opens the directory, compares what it finds with the story so far, says
["opened"], and then works at random, saying "putting", "durable", "removing", "gone", "resetting"
and "reset" as it goes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import structlog
from rig import TOKENS_PER_BLOCK, Rig, check_books, open_rig, pattern, prompt, slots_of

from flexkv import CapacityError, TransferError
from flexkv.transfer import Transfer

FAMILIES, MEMBERS = 10, 4
PROMPTS = FAMILIES * MEMBERS
ALL_BLOCKS = FAMILIES * (6 + 3 + 3)
WORKERS, WORKER_BLOCKS = 3, 8


@lru_cache
def universe(number: int) -> list[int]:
    """Tokens of prompt `number`: families of four that share prefixes of several lengths."""
    family, member = divmod(number, MEMBERS)
    base = prompt(10 * family, 6)
    branch = prompt(10 * family + 1, 5, shared=base[: 2 * TOKENS_PER_BLOCK])
    twig = prompt(10 * family + 2, 7, shared=branch[: 4 * TOKENS_PER_BLOCK])
    return [base, base[: 3 * TOKENS_PER_BLOCK], branch, twig][member]


def prefixes(number: int) -> set[int]:
    """Prompts that prompt `number` contains, itself included."""
    tokens = universe(number)
    return {other for other in range(PROMPTS) if tokens[: len(universe(other))] == universe(other)}


class Story:
    """What must be found (`durable`) and what must not (`gone`), from what children said."""

    def __init__(self, durable: list[int], gone: list[int]) -> None:
        self.durable, self.gone = set(durable), set(gone)
        self._resetting = False

    def tell(self, words: list[Any]) -> None:
        """Take one message into account."""
        match words:
            case ["putting", number]:
                self.gone -= prefixes(number)
            case ["durable", number] if not self._resetting:
                self.durable |= prefixes(number)
            case ["removing", number]:
                self.durable -= prefixes(number)
            case ["gone", number]:
                self.gone.add(number)
            case ["resetting"]:
                self.durable.clear()
                self._resetting = True
            case ["reset"]:
                self.durable.clear()
                self.gone = set(range(PROMPTS))
                self._resetting = False
            case ["pid", _]:
                self._resetting = False


def say(*words: Any) -> None:
    """One line, in one write."""
    os.write(1, (json.dumps(words) + "\n").encode())


async def load(rig: Rig, number: int, first: int) -> int:
    """Get a prompt into device blocks from `first` on, check its bytes; returns blocks loaded."""
    tokens = universe(number)
    count = len(tokens) // TOKENS_PER_BLOCK
    result = await rig.kv.get_async(tokens, slots_of(range(first, first + count)))
    loaded: int = result.loaded // TOKENS_PER_BLOCK
    for i in range(loaded):
        wrong = not np.array_equal(rig.device.read(first + i), pattern(tokens, i))
        assert not wrong, f"block {i} of prompt {number} holds wrong bytes"
    return loaded


async def verify(rig: Rig, durable: list[int], gone: list[int], *, large: bool) -> None:
    """Compare what is found with the story so far, and the books with each other."""
    await rig.kv.flush()
    check_books(rig.kv)
    for number in range(PROMPTS):
        loaded, blocks = await load(rig, number, 0), len(universe(number)) // TOKENS_PER_BLOCK
        if large and number in durable:
            assert loaded == blocks, f"{loaded} of {blocks} durable blocks of {number} came back"
        if number in gone:
            assert loaded < blocks, f"prompt {number} was forgotten, and came back"
    await rig.kv.flush()
    check_books(rig.kv)


class Worker:
    """Random work on one manager, with device blocks of its own."""

    def __init__(self, rig: Rig, number: int, seed: int, puts: list[int]) -> None:
        self.rig, self.first = rig, number * WORKER_BLOCKS
        self.puts = puts  # begun by anybody, per prompt
        self.random = np.random.default_rng([seed, number])

    async def work(self) -> None:
        """Work until killed."""
        verbs = [self.put, self.put_only, self.get, self.prefetch, self.remove, self.reset]
        shares = [0.48, 0.1, 0.22, 0.09, 0.1, 0.01]
        while True:
            verb = verbs[self.random.choice(len(verbs), p=shares)]
            try:
                await verb(int(self.random.integers(PROMPTS)))
            except (CapacityError, TransferError):
                await asyncio.sleep(0)  # no room, or taken away by another worker: go on

    async def put_only(self, number: int) -> None:
        await self.begin(number)

    def begin(self, number: int) -> Transfer:
        say("putting", number)
        for other in prefixes(number):
            self.puts[other] += 1
        return self.rig.start_put(universe(number), first=self.first)

    async def put(self, number: int) -> None:
        transfer = self.begin(number)
        await transfer
        await transfer.durable()
        say("durable", number)

    async def get(self, number: int) -> None:
        await load(self.rig, number, self.first)

    async def prefetch(self, number: int) -> None:
        await self.rig.kv.prefetch_async(universe(number))

    async def remove(self, number: int) -> None:
        say("removing", number)
        puts = self.puts[number]
        removed = self.rig.kv.remove(universe(number))
        await self.rig.kv.flush()
        if removed and self.puts[number] == puts:
            say("gone", number)

    async def reset(self, number: int) -> None:
        say("resetting")
        await self.rig.kv.reset()
        say("reset")


async def live(job: dict[str, Any]) -> None:
    """Do what the job says."""
    large = job.get("large", True)
    settings = {
        "dirs": job.get("dirs", 2),
        "disk": job.get("disk", ALL_BLOCKS + 8 if large else 40),
        "host": job.get("host", 32),
        **job.get("settings", {}),
    }
    async with open_rig(Path(job["path"]), **settings) as rig:
        if job["mode"] == "random":
            await verify(rig, job["durable"], job["gone"], large=large)
            say("opened")
            puts = [0] * PROMPTS
            workers = [Worker(rig, number, job["seed"], puts) for number in range(WORKERS)]
            await asyncio.gather(*(worker.work() for worker in workers))
        elif job["mode"] == "six":
            for name in range(6):
                await rig.put(prompt(name, 1))
        elif job["mode"] == "seventh":
            gate = rig.faults().hold("record")
            await rig.start_put(prompt(6, 1))
            await gate.reached.wait()
            say("writing")
            await asyncio.Event().wait()
        elif job["mode"] == "hold":
            say("holding")
            await asyncio.Event().wait()
    say("closed")


def main() -> None:
    """Serve jobs until stdin ends."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    for number in range(PROMPTS):
        for block in range(len(universe(number)) // TOKENS_PER_BLOCK):
            pattern(universe(number), block)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                asyncio.run(live(json.loads(line)))
            except BaseException:
                say("failed", traceback.format_exc())
            os._exit(0)
        say("pid", child)
        os.waitpid(child, 0)
        say("dead")


class Zygote:
    """The warm parent of children that use a directory until they are killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._buffer = b""
        self._pid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
        self._in.close()
        self._process.wait()
        self._out.close()

    def start(self, path: Path, **job: Any) -> None:
        """Start a child; see the module for jobs."""
        self._in.write((json.dumps({"path": str(path), **job}) + "\n").encode())
        self._in.flush()
        self._pid = self.wait_for("pid")[1]

    def hear(self, until: float = float("inf")) -> list[Any] | None:
        """The next message, None if there is none up to `until` (time.monotonic)."""
        while b"\n" not in self._buffer:
            left = max(0.0, until - time.monotonic())
            if not select.select([self._out], [], [], None if until == float("inf") else left)[0]:
                return None
            data = os.read(self._out.fileno(), 1 << 16)
            assert data, "the parent of the children died"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        words: list[Any] = json.loads(line)
        assert words[0] != "failed", words[1]
        if words == ["dead"]:
            self._pid = 0
        return words

    def wait_for(self, word: str) -> list[Any]:
        """The next message that begins with `word`."""
        while True:
            words = self.hear()
            assert words is not None
            if words[0] == word:
                return words

    def join(self) -> list[list[Any]]:
        """Wait for the child's end; returns what it said until then."""
        heard = []
        while self._pid:
            words = self.hear()
            assert words is not None
            heard.append(words)
        return heard

    def kill(self) -> list[list[Any]]:
        """Kill -9; returns what the child still said."""
        os.kill(self._pid, signal.SIGKILL)
        return self.join()

    @property
    def pid(self) -> int:
        """Process id of the child, 0 when there is none."""
        return self._pid


if __name__ == "__main__":
    main()
