"""What the directory of a cluster costs: `run` (real processes on a real Redis), `model` (what that
means for other numbers of nodes).

Nodes are processes with an index, its events and the holdings of the others, without bytes. They
change as many blocks per second whatever they hold; freshness is the time from a change until the
node that made it reads it back, in line with the changes of all others.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import anyio
import anyio.to_thread
import numpy as np

from flexkv.bench.directory_model import model
from flexkv.bench.report import Progress, Result, percentile
from flexkv.brain import build_brain
from flexkv.cluster.directory import Directory
from flexkv.cluster.holdings import Holdings
from flexkv.cluster.redisclient import Link
from flexkv.cluster.settings import ClusterSettings
from flexkv.cluster.wire import NodeRecord
from flexkv.errors import ConfigError, StalledError
from flexkv.events import EventLog
from flexkv.index import PrefixIndex
from flexkv.model import HOST, NO_BLOCK, PEER
from flexkv.telemetry import Telemetry
from flexkv.testing.harness import Unsupported
from flexkv.testing.remote import RedisServer

_CHAIN = 50  # blocks of a prompt
_TICK_S = 0.02
_PATIENCE_S = 300.0


def run(
    progress: Progress,
    *,
    nodes: int = 8,
    blocks: int = 200_000,
    times: Sequence[int] = (1, 4),
    changes_per_s: int = 1000,
    seconds: float = 15.0,
    url: str = "",
    only_model: bool = False,
) -> list[Result]:
    """Measure what a node costs in steady state with `blocks` blocks, times each of `times`, how
    fresh news are, and how long a node that joins takes to know all.

    `changes_per_s` blocks of each node come or go. `only_model`: measure nothing, show the model.

    Raises:
        ConfigError: there is no server.
        StalledError: nodes did not come to know each other.
    """
    results: list[Result] = []
    for number, factor in enumerate(() if only_model else times):
        progress(f"{nodes} nodes of {blocks * factor} blocks", number, len(times))
        server = None
        if not url:
            try:
                server = RedisServer()
            except Unsupported as reason:
                raise ConfigError(str(reason)) from reason
        try:
            where = url or (server.url if server else "")
            cluster = _Cluster(where, nodes, blocks * factor, changes_per_s)
            results += anyio.run(cluster.measure, seconds)
        finally:
            if server is not None:
                server.stop()
    return results + model()


class _Cluster:
    """The nodes of one measurement, seen from their parent."""

    def __init__(self, url: str, nodes: int, blocks: int, changes_per_s: int) -> None:
        self._settings = ClusterSettings(url=url, name=f"bench-{blocks}")
        self._nodes, self._blocks, self._changes = nodes, blocks, changes_per_s
        self._processes: list[Any] = []

    async def measure(self, seconds: float) -> list[Result]:
        """Start the nodes, let them change, let another one join."""
        link = Link(self._settings)
        try:
            pipes = [self._start(number, self._blocks) for number in range(self._nodes)]
            others = (self._nodes - 1) * self._blocks
            await _all(pipes, ("know", others))
            before = await link.ask("INFO", "stats")
            answers = await _all(pipes, ("change", seconds))
            after = await link.ask("INFO", "stats")
            newcomer = self._start(self._nodes, 0)
            (joined,) = await _all([newcomer], ("know", self._nodes * self._blocks))
            await _all([*pipes, newcomer], ("end", 0))
        finally:
            for process in self._processes:
                process.kill()
                process.join()
            await link.aclose()
        return self._results(before, after, answers, joined, seconds)

    def _start(self, number: int, blocks: int) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        capacity = (self._nodes + 1) * self._blocks
        given = (theirs, self._settings, number, blocks, capacity, self._changes)
        process = context.Process(target=_node, args=given, daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        return ours

    def _results(
        self,
        before: dict[str, Any],
        after: dict[str, Any],
        answers: list[dict[str, Any]],
        joined: dict[str, Any],
        seconds: float,
    ) -> list[Result]:
        params = {"nodes": self._nodes, "blocks": self._blocks, "changes_per_s": self._changes}
        each = self._nodes * seconds

        def rate(name: str) -> float:
            return float(after[name] - before[name]) / each

        lags = [lag for answer in answers for lag in answer["lags"]]
        changes = sum(answer["changes"] for answer in answers)
        cpu = sum(answer["cpu_s"] for answer in answers) / each
        received = rate("total_net_input_bytes")
        figures = {
            "to the server, per node": (received, "B/s"),
            "from the server, per node": (rate("total_net_output_bytes"), "B/s"),
            "commands, per node": (rate("total_commands_processed"), "1/s"),
            "to the server, per changed block": (received * each / changes, "B"),
            "CPU, per node": (cpu, "cores"),
            "changes, per node": (changes / each, "1/s"),
            "snapshots in this time": (sum(answer["snapshots"] for answer in answers), ""),
            "freshness p50": (percentile(lags, 50), "s"),
            "freshness p99": (percentile(lags, 99), "s"),
            f"rebuild of {self._nodes * self._blocks} blocks": (joined["taken_s"], "s"),
        }
        return [
            Result(name, value, unit, samples=len(lags), params=params)
            for name, (value, unit) in figures.items()
        ]


async def _all(pipes: Sequence[Connection], command: tuple[str, float]) -> list[dict[str, Any]]:
    """Ask all nodes at once; wait for all answers."""
    for pipe in pipes:
        pipe.send(command)
    answers = []
    for pipe in pipes:
        there = await anyio.to_thread.run_sync(pipe.poll, _PATIENCE_S)
        answer = pipe.recv() if there else {"problem": "no answer"}
        if "problem" in answer:
            raise StalledError(f"a node of the benchmark: {answer['problem']}")
        answers.append(answer)
    return answers


# in the nodes


class _Lags(Telemetry):
    """Keeps every lag."""

    def __init__(self) -> None:
        super().__init__()
        self.lags: list[float] = []

    def observe(self, name: str, value: float, **labels: str) -> None:
        if name == "directory_lag_seconds":
            self.lags.append(value)


class _Blocks:
    """A node's own blocks: an index without bytes."""

    def __init__(self, number: int, count: int) -> None:
        self._number, self._made = number, 0
        self.index = PrefixIndex(count + 64 * _CHAIN, (HOST,))
        self._chains: deque[np.ndarray[Any, Any]] = deque()
        for _ in range(count // _CHAIN):
            self._add()

    def _add(self) -> None:
        dice = np.random.default_rng((self._number, self._made))
        self._made += 1
        keys = dice.integers(1, 2**64, (_CHAIN, 2), np.uint64)
        blocks = self.index.insert(keys, NO_BLOCK)
        self.index.land(0, blocks, np.arange(_CHAIN, dtype=np.uint32))
        self.index.ready(0, blocks, 0.0)
        self._chains.append(blocks)

    def turn_over(self) -> int:
        """Replace the oldest chain; return how many blocks changed."""
        self.index.drop(0, self._chains.popleft()[::-1])
        self._add()
        return 2 * _CHAIN


def _node(
    pipe: Connection,
    settings: ClusterSettings,
    number: int,
    blocks: int,
    capacity: int,
    changes_per_s: int,
) -> None:
    """What a process of the benchmark does."""
    own = _Blocks(number, blocks)
    brain = build_brain(
        {HOST: 1, PEER: capacity}, lambda tier: "lru", tokens_per_block=16, foreign=(PEER,)
    )
    holdings = Holdings(brain.ledger, brain.ledger.tiers[PEER])
    events = EventLog(own.index, 1 << 20, lambda dropped: None).listen()
    record = NodeRecord(
        node=f"node-{number}", incarnation=number, epoch=0, identity=b"bench", addresses={}
    )
    telemetry = _Lags()
    directory = Directory(settings, record, events, holdings, time.monotonic, telemetry)

    async def know(count: float) -> dict[str, Any]:
        begun = time.monotonic()
        while sum(holdings.nodes().values()) < count:
            if time.monotonic() - begun > _PATIENCE_S:
                return {"problem": f"{holdings.nodes()} of {count} blocks"}
            await anyio.sleep(_TICK_S)
        return {"taken_s": time.monotonic() - begun}

    async def change(seconds: float) -> dict[str, Any]:
        telemetry.lags.clear()
        snapshots = telemetry.value("directory_snapshots")
        begun, cpu, done = time.monotonic(), time.process_time(), 0
        while (passed := time.monotonic() - begun) < seconds:
            while done < passed * changes_per_s:
                done += own.turn_over()
            await anyio.sleep(_TICK_S)
        return {
            "changes": done,
            "cpu_s": time.process_time() - cpu,
            "lags": list(telemetry.lags),
            "snapshots": telemetry.value("directory_snapshots") - snapshots,
        }

    verbs: dict[str, Callable[[float], Any]] = {"know": know, "change": change}
    anyio.run(partial(_serve, pipe, directory, verbs))


async def _serve(
    pipe: Connection, directory: Directory, verbs: dict[str, Callable[[float], Any]]
) -> None:
    """Take part, and do what the parent asks for."""
    async with anyio.create_task_group() as group:
        group.start_soon(directory.run)
        while True:
            verb, argument = await anyio.to_thread.run_sync(pipe.recv)
            if verb == "end":
                pipe.send({})
                group.cancel_scope.cancel()
                return
            pipe.send(await verbs[verb](argument))
