"""The connector in the fake engine, on rough ground: `running`, `Load`, `options_of`, `check_rest`.

`installed` modules of vLLM must be in place (see `vllm_modules`) before an engine is made.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, ClassVar

import anyio
import numpy as np
from fakes import FakeRemote, MemoryStore, plugged
from vllm_engine import FakeEngine

from flexkv.backends.cpu import CpuBackend
from flexkv.errors import TransferError
from flexkv.model import IOStatus, KVSpec, Statuses
from flexkv.protocols import BlockCopy, BlockIO, Region

MINORS = (19, 22, 25, 28, 30, 32, 33)


HINTS: tuple[dict[str, Any], ...] = (
    {"flexkv": {"priority": 80, "ttl_s": 5}},
    {"flexkv": {"steps": 1, "prefetch": True}},
    {"flexkv": {"priority": "high"}},
    {"flexkv": ["priority"]},
)


class RoughDevice(CpuBackend):
    """Memory whose copies take their time, and of which a share fails half way."""

    dice: ClassVar[random.Random]
    failing: ClassVar[float] = 0.0
    slow: ClassVar[float] = 0.3

    def make_region(self, kv_caches: Any, spec: KVSpec, axes: str | None = None) -> Region:
        plain = {name: np.asarray(tensor) for name, tensor in kv_caches.items()}
        return super().make_region(plain, spec, axes)

    async def copy(self, batch: BlockCopy) -> None:
        if self.dice.random() < self.slow:
            await anyio.sleep(self.dice.random() * 4e-3)
        await super().copy(batch)
        if self.dice.random() < self.failing:
            if batch.to_device:  # something else has landed
                last = len(batch.host_slots) - 1
                slots = batch.host_slots[[last, *range(last)]]
                await super().copy(
                    BlockCopy(batch.region, batch.device_blocks, slots, True, batch.layers)
                )
            raise TransferError("the device was gone for a moment")


@contextmanager
def running(
    connector: type, dice: random.Random, failing: float = 0.0, **options: Any
) -> Iterator[FakeEngine]:
    """An engine on a rough device; at the end nothing is left of anything."""
    with opened(connector, dice, failing, **options) as engine:
        yield engine
        engine.settle()
        check_rest(engine)


@contextmanager
def opened(
    connector: type, dice: random.Random, failing: float = 0.0, **options: Any
) -> Iterator[FakeEngine]:
    """An engine on a rough device, and a rough store if `disk_cache_bytes` is given."""
    rough = {"dice": random.Random(dice.random()), "failing": failing}
    settings = {"host_cache_bytes": 128 << 10, "huge_pages": False} | options
    settings["axes"] = "PBHND" if options.get("minor", 32) < 25 else "BHNC"
    with ExitStack() as stack:
        device = stack.enter_context(plugged(type("Rough", (RoughDevice,), dict(rough))))
        if "disk_cache_bytes" in settings:
            store = stack.enter_context(plugged(type("Store", (RoughStore,), dict(rough))))
            name = f"rough-{dice.random()}"
            settings |= {"disk_backend": store, "disk_dirs": [name]}
            stack.callback(MemoryStore.kept.pop, f"('{name}',)", None)
        engine = FakeEngine(connector, dice, device=device, **settings)
        stack.callback(engine.shutdown)
        yield engine


class RoughStore(FakeRemote):
    """A store of which a share of the reads fails, each block in its own way."""

    dice: ClassVar[random.Random]
    failing: ClassVar[float] = 0.0

    async def read(self, batch: BlockIO) -> Statuses:
        statuses = await super().read(batch)
        for i in range(len(statuses)):
            if self.dice.random() < self.failing:
                statuses[i] = self.dice.choice(
                    (IOStatus.FAILED, IOStatus.DAMAGED, IOStatus.MISSING)
                )
        if self.dice.random() < self.failing / 10:
            raise OSError("the disk is gone for a moment")
        return statuses


def side(engine: FakeEngine) -> Any:
    """The scheduler's side of the connector, however it is wrapped."""
    inner = getattr(engine.connector, "_flexkv_connector", engine.connector)
    return inner.scheduler.side


def check_rest(engine: FakeEngine) -> None:
    """Nothing is held by anybody, and what vLLM's own cache holds is right."""
    assert not any(engine.pool.users), "blocks are still in use"
    assert not engine.requests
    scheduler = side(engine)
    scheduler.kv.flush()
    usage = scheduler.kv.usage()["manager"]
    idle = {name: usage[name] for name in ("plans", "transfers", "pinned", "tickets")}
    assert idle == dict.fromkeys(idle, 0)
    assert not scheduler._states
    assert not scheduler._pending
    assert not scheduler._carrier.done
    scheduler.kv.call(int)
    assert not scheduler._carrier._tasks
    assert not scheduler.busy()
    assert engine.reset()


class Load:
    """Random requests over a few shared beginnings; it knows their answers."""

    def __init__(self, engine: FakeEngine, dice: random.Random) -> None:
        self.engine, self.dice = engine, dice
        self.shared = [[dice.randrange(50) for _ in range(dice.randrange(8, 48))] for _ in range(3)]
        self.salts = [None, None, "a", "b"]
        self.asked: dict[str, Any] = {}
        self.aborted: set[str] = set()

    def add(self) -> None:
        dice = self.dice
        prompt = dice.choice(self.shared) + [dice.randrange(50) for _ in range(dice.randrange(24))]
        name = f"r{len(self.asked)}"
        salt = dice.choice(self.salts)
        hint = dice.choice((None, None, *HINTS))
        self.asked[name] = self.engine.add(name, prompt, dice.randrange(1, 20), salt, hint)

    def abort(self) -> None:
        if alive := [name for name in self.engine.requests if name not in self.aborted]:
            name = self.dice.choice(alive)
            self.aborted.add(name)
            self.engine.abort(name, now=self.dice.random() < 0.5)

    def cut(self) -> None:
        """End a worker's connection to the manager, which it will make again."""
        worker = self.dice.choice(self.engine.workers)
        agent = getattr(worker, "_flexkv_connector", worker).worker._agent
        connection = agent._connection
        if connection is not None:
            with suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)

    def run(self, actions: int, cuts: float = 0.0) -> None:
        """Mix adding, aborting, stepping and resetting."""
        for _ in range(actions):
            point = self.dice.random()
            if self.dice.random() < cuts:
                self.cut()
            elif point < 0.25 and len(self.engine.requests) < 24:
                self.add()
            elif point < 0.29:
                self.abort()
            elif point < 0.31:
                self.engine.reset(connector=self.dice.random() < 0.2)
            else:
                self.engine.step()

    def check(self) -> None:
        """Whoever was not aborted has finished with the right tokens."""
        for name, request in self.asked.items():
            if name not in self.aborted:
                assert request.status in ("FINISHED_STOP", "FINISHED_LENGTH"), name
                wanted = [request.chain.token(place) for place in range(request.num_tokens)]
                assert request.all_token_ids == wanted


def options_of(dice: random.Random) -> dict[str, Any]:
    """A random engine."""
    minor = dice.choice(MINORS)
    depth = dice.choice((1, 1, 2))
    disk = {"disk_cache_bytes": 1 << 20} if dice.random() < 0.4 else {}
    return {
        **disk,
        "minor": minor,
        "ranks": dice.choice((1, 1, 2)),
        "depth": depth,
        "defer_frees": depth == 2 and minor >= 28 and dice.random() < 0.5,
        "blocks": dice.choice((40, 56, 120)),
        "budget": dice.choice((16, 40, 100)),
        "load": "async" if depth == 2 or minor < 28 or dice.random() < 0.5 else "sync",
        "save": dice.choice(("finish", "finish", "prompt")),
        "host_cache_bytes": dice.choice((64 << 10, 256 << 10, 1 << 20)),
        "save_every_tokens": dice.choice((0, 0, 4, 16)),
        "min_load_tokens": dice.choice((0, 0, 8)),
    }
