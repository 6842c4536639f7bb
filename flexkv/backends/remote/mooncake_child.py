"""The program in which Mooncake runs: a process of its own, because its calls have no time-out.

Whoever gives up on a call kills this process, and then knows that no byte can land any more.
Started by `flexkv.backends.remote.mooncake_process` as a plain file: it imports nothing of flexkv,
so that it is there in a tenth of a second. It ends when the other end of its first pipe does.

Pipes carry msgpack: first the set-up, then [verb, ...] -> answer or {"error": text}.
Memory comes as files that are mapped here, too; addresses are (region, offset) on the pipe.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec

NOT_FOUND, WRONG_SIZE, TRANSFER_FAILED = -704, -600, -800  # what Mooncake answers


class Store:
    """A client of Mooncake Store. Blocks are heads (region 1) and bodies (region 0), together."""

    def __init__(self, setup: dict[str, Any], bases: list[int], sizes: list[int]) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self._bases, self._head, self._body = bases, setup["head_bytes"], setup["block_bytes"]
        host, _, port = setup["master"].rpartition(":")
        reached = _await(host, int(port))
        self._store = MooncakeDistributedStore()
        self._how = ReplicateConfig()
        self._how.replica_num = setup["replicas"]
        code = self._store.setup(
            setup["host"] or reached,
            setup["metadata"],
            setup["segment_bytes"],
            setup["buffer_bytes"],
            setup["protocol"],
            setup["devices"],
            setup["master"],
            tenant_id=setup["tenant"],
        )
        self._lends = setup["segment_bytes"] > 0
        if code:
            raise OSError(f"Mooncake's set-up answered {code}")
        for base, size in zip(bases, sizes, strict=True):
            if code := self._store.register_buffer(base, size):
                raise OSError(f"Mooncake does not register {size} bytes: {code}")

    def read(self, names: list[str], heads: int, bodies: list[int]) -> list[int]:
        """Bytes read of each, or a code below 0; another size than asked for is told as it is."""
        places, sizes = self._places(heads, bodies)
        answers: list[int] = self._store.batch_get_into_multi_buffers(names, places, sizes)
        for number, answer in enumerate(answers):
            if answer in (WRONG_SIZE, TRANSFER_FAILED):
                size = self._store.get_size(names[number])
                if size >= 0 and size != self._head + self._body:
                    answers[number] = size
        return answers

    def write(self, names: list[str], heads: int, bodies: list[int]) -> list[int]:
        """0 where the block is there now, or was before."""
        answers: list[int] = self._store.batch_put_from_multi_buffers(
            names, *self._places(heads, bodies), self._how
        )
        return answers

    def discard(self, names: list[str]) -> list[int]:
        """0 where the block is gone now."""
        answers: list[int] = self._store.batch_remove(names, True)
        return answers

    def _places(self, heads: int, bodies: list[int]) -> tuple[list[list[int]], list[list[int]]]:
        base, first = self._bases[0], self._bases[1] + heads
        places = [[first + number * self._head, base + body] for number, body in enumerate(bodies)]
        return places, [[self._head, self._body]] * len(bodies)

    def close(self) -> None:
        """Say goodbye, so that what this process lent is not asked for any more."""
        if self._lends:
            self._store.close()


class Engine:
    """A Transfer Engine: others read the memory of region 0, and it reads theirs into it."""

    def __init__(self, setup: dict[str, Any], bases: list[int], sizes: list[int]) -> None:
        from mooncake.engine import TransferEngine

        self._host, self._base, self._size = setup["host"], bases[0], setup["block_bytes"]
        self._engine = TransferEngine()
        words = (self._host, setup["metadata"], setup["protocol"], setup["devices"])
        if code := self._engine.initialize(*words):
            raise OSError(f"Mooncake's engine answered {code}")
        if code := self._engine.register_memory(bases[0], sizes[0]):
            raise OSError(f"Mooncake does not register {sizes[0]} bytes: {code}")

    def where(self) -> list[Any]:
        """What others call this engine, and the address of the memory here."""
        return [f"{self._host}:{self._engine.get_rpc_port()}", self._base]

    def fetch(self, session: str, sources: list[int], targets: list[int]) -> int:
        """Read blocks from addresses of `session` to offsets here; 0 where all of them came."""
        places, sizes = [self._base + target for target in targets], [self._size] * len(targets)
        code: int = self._engine.batch_transfer_sync_read(session, places, sources, sizes)
        return code

    def close(self) -> None:
        """Nothing: others notice when this process is gone."""


KINDS: dict[str, Callable[[dict[str, Any], list[int], list[int]], Any]] = {
    "store": Store,
    "engine": Engine,
}


def _await(host: str, port: int) -> str:
    """Wait until somebody listens there (the set-up itself would block for minutes).

    Returns this machine's address as seen from there.
    """
    while True:
        try:
            with socket.create_connection((host, port), 1.0) as connection:
                address: str = connection.getsockname()[0]
                return address
        except OSError:
            threading.Event().wait(0.05)


def _map(fd: int) -> tuple[int, int]:
    """Map a file; address and size. It stays for the life of this process."""
    memory = mmap.mmap(fd, 0)
    _MAPPED.append(memory)
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)


_MAPPED: list[mmap.mmap] = []


def _answer(pipe: Connection, engine: Any) -> None:
    """Do what comes through one pipe, until it ends."""
    pipe.send_bytes(b"ready")
    while True:
        try:
            verb, *words = msgspec.msgpack.decode(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer: Any = getattr(engine, verb)(*words)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        pipe.send_bytes(msgspec.msgpack.encode(answer))


def main(control_fd: int, pipe_fds: list[int], region_fds: list[int]) -> None:
    """Serve until the control pipe ends."""
    control = Connection(control_fd)
    setup = msgspec.msgpack.decode(control.recv_bytes())
    os.environ.update(setup["environment"])
    engines: list[Any] = []

    def work() -> None:
        mapped = [_map(fd) for fd in region_fds]
        bases, sizes = [base for base, _ in mapped], [size for _, size in mapped]
        try:
            engine = KINDS[setup["kind"]](setup, bases, sizes)
        except Exception as error:
            control.send_bytes(f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        engines.append(engine)
        for fd in pipe_fds:
            pipe = Connection(fd)
            threading.Thread(target=_answer, args=(pipe, engine), daemon=True).start()

    threading.Thread(target=work, daemon=True).start()
    try:
        control.recv_bytes()  # "close", or the end of the one who started us
        for engine in engines:
            engine.close()
    except EOFError:
        pass
    os._exit(0)


if __name__ == "__main__":
    numbers = [[int(word) for word in argument.split(",") if word] for argument in sys.argv[1:]]
    main(numbers[0][0], numbers[1], numbers[2])
