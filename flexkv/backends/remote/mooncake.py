"""Blocks as objects in Mooncake Store: `MooncakeStore`, memory that many machines lend each other.

Bytes move between the arena and the machine that holds an object, in one step; where they lie is
asked from Mooncake's master. Mooncake itself runs in a child (see `mooncake_process`).
https://kvcache-ai.github.io/Mooncake/
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from flexkv._core import ffi
from flexkv.backends.remote.couriers import Client
from flexkv.backends.remote.heads import HEAD
from flexkv.backends.remote.mooncake_process import MooncakeProcess, installed, require
from flexkv.backends.remote.settings import RemoteSettings, hidden
from flexkv.backends.remote.store import RemoteStore
from flexkv.errors import ConfigError
from flexkv.memory import Arena
from flexkv.model import DAMAGED, FAILED, LANDED, MISSING, Statuses
from flexkv.protocols import DeviceInfo, Recovered, Services

CALL_BYTES = 64 << 20  # what one call moves at most, and has `timeout_ms` for
CALL_BLOCKS = 256  # of one call at most: their heads lie side by side
_NOT_FOUND, _NO_MASTER = -704, -900  # answers of Mooncake


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSettings(RemoteSettings):
    """What may be set for Mooncake Store.

    `master` is where mooncake_master answers, host:port. `host` is this machine's name for the
    others (what the master sees, if empty). `segment_bytes` of this machine's memory are lent to
    the store, for as long as the cache is open (0: none). Bytes move by `protocol` (tcp, rdma, ...)
    over `devices` (names, comma-separated; empty: all), and each object lies on `replicas`
    machines. `metadata` is P2PHANDSHAKE or the URL of Mooncake's metadata server, `tenant` whose
    quota counts, `environment` Mooncake's own variables (MC_...). With `verbose`, Mooncake's own
    log goes to stderr.
    """

    master: str = "127.0.0.1:50051"
    metadata: str = hidden("P2PHANDSHAKE")
    host: str = ""
    protocol: str = "tcp"
    devices: str = ""
    segment_bytes: int = 0
    buffer_bytes: int = 16 << 20
    replicas: int = 1
    tenant: str = "default"
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    verbose: bool = False

    def check(self) -> None:
        """See RemoteSettings.check."""
        RemoteSettings.check(self)
        host, _, port = str(self.master).rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"remote store: master must be host:port, got {self.master!r}")
        for name, least in (("segment_bytes", 0), ("buffer_bytes", 1), ("replicas", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"remote store: {name} must be >= {least}, got {value!r}")
        if not all(isinstance(word, str) for pair in self.environment.items() for word in pair):
            raise ConfigError("remote store: environment must be words for words")
        require()

    def setup(self) -> dict[str, Any]:
        """What the child is told."""
        own = {option.name for option in fields(RemoteSettings)}
        names = [option.name for option in fields(self) if option.name not in own]
        return {name: getattr(self, name) for name in names}


class MooncakeStore(RemoteStore):
    """Objects in Mooncake Store, one for each block. Settings: see `MooncakeSettings`."""

    name: ClassVar[str] = "mooncake"
    settings_type = MooncakeSettings
    settings: MooncakeSettings

    @classmethod
    def probe(cls) -> Sequence[DeviceInfo]:
        """Say whether Mooncake is installed."""
        return [DeviceInfo(cls.name)] if installed() else []

    async def open(self, services: Services) -> Recovered | None:
        """See RemoteStore.open."""
        settings = self.settings_type.read(services.settings)
        arena, size = services.arena, services.identity.spec.block_bytes
        self._heads = Arena(settings.connections, CALL_BLOCKS * HEAD.itemsize, huge_pages=False)
        sizes = {"head_bytes": HEAD.itemsize, "block_bytes": size}
        self._process = MooncakeProcess(
            settings.setup() | sizes | {"kind": "store"},
            [arena, self._heads],
            settings.connections,
        )
        self._lanes = itertools.count()
        self._clients = (arena, size)
        return await RemoteStore.open(self, services)

    @property
    def child_pid(self) -> int | None:
        """Of the process that Mooncake runs in, where there is one now."""
        return self._process.pid

    def connect(self) -> Client:
        """Make a client."""
        arena, size = self._clients
        return MooncakeClient(
            self._process,
            next(self._lanes),
            arena,
            self._heads,
            size,
            self.settings.timeout_ms / 1e3,
        )

    def disconnect(self) -> None:
        """End the child."""
        self._process.close()
        self._heads.close()


class MooncakeClient:
    """One lane to the child. Calls move no bytes here: they say where bytes lie."""

    def __init__(
        self,
        process: MooncakeProcess,
        lane: int,
        arena: Arena,
        heads: Arena,
        block_bytes: int,
        timeout_s: float,
    ) -> None:
        self._process, self._lane, self._base = process, lane, arena.base
        self._heads = heads.view(lane)
        self._first = lane * heads.stride_bytes
        self._block_bytes, self._timeout_s = block_bytes, timeout_s
        self._step = max(1, min(CALL_BLOCKS, CALL_BYTES // block_bytes))
        process.start()

    # --- the verbs of Client

    def read(
        self,
        names: Sequence[bytes],
        heads: Sequence[memoryview],
        bodies: Sequence[memoryview],
        statuses: Statuses,
    ) -> None:
        """Get the objects, into the arena."""
        size = self._block_bytes + HEAD.itemsize
        rows = self._heads.reshape(-1, HEAD.itemsize)
        for part in _parts(names, self._step):
            answers = self._move("read", part, names, bodies)
            statuses[part] = _judged(answers, {size: LANDED, _NOT_FOUND: MISSING}, DAMAGED)
            for number, row in zip(part, rows, strict=False):
                heads[number][:] = row.data

    def write(
        self,
        names: Sequence[bytes],
        heads: Sequence[memoryview],
        bodies: Sequence[memoryview],
        statuses: Statuses,
    ) -> None:
        """Put the objects, from the arena; one that is there already stays."""
        rows = self._heads.reshape(-1, HEAD.itemsize)
        for part in _parts(names, self._step):
            for number, row in zip(part, rows, strict=False):
                row.data[:] = heads[number]
            answers = self._move("write", part, names, bodies)
            statuses[part] = _judged(answers, {0: LANDED}, FAILED)

    def discard(self, names: Sequence[bytes], statuses: Statuses) -> None:
        """Remove the objects, also those that somebody reads: what he gets is checked."""
        for part in _parts(names, CALL_BLOCKS):
            answers = self._call("discard", [names[number].decode() for number in part])
            statuses[part] = _judged(answers, {0: LANDED, _NOT_FOUND: MISSING}, FAILED)

    def close(self) -> None:
        """Nothing: a call that fails has ended the child already."""

    # --- inside

    def _move(
        self, verb: str, part: list[int], names: Sequence[bytes], bodies: Sequence[memoryview]
    ) -> list[int]:
        words = [names[number].decode() for number in part]
        offsets = [_address(bodies[number]) - self._base for number in part]
        return self._call(verb, words, self._first, offsets)

    def _call(self, verb: str, *words: Any) -> list[int]:
        answers: list[int] = self._process.call(self._lane, self._timeout_s, verb, *words)
        if len(answers) != len(words[0]):
            raise OSError(f"{len(answers)} answers to {len(words[0])} questions")
        return answers


def _parts(names: Sequence[bytes], most: int) -> Iterator[list[int]]:
    """Cut into parts of at most `most` positions; no name is in a part twice, which Mooncake would
    answer wrongly.
    """
    part: dict[bytes, int] = {}
    for number, name in enumerate(names):
        if len(part) == most or name in part:
            yield list(part.values())
            part = {}
        part[name] = number
    yield list(part.values())


def _judged(answers: list[int], known: dict[int, int], positive: int) -> list[int]:
    """Turn Mooncake's codes into statuses.

    Raises:
        OSError: the master is away, or nothing at all could be done.
    """
    statuses = [known.get(code, positive if code > 0 else FAILED) for code in answers]
    if _NO_MASTER in answers:
        raise OSError("Mooncake's master does not answer")
    if all(status == FAILED for status in statuses):
        raise OSError(f"Mooncake answered {sorted(set(answers))}")
    return statuses


def _address(view: memoryview) -> int:
    return int(ffi.cast("uintptr_t", ffi.from_buffer("char[]", view)))
