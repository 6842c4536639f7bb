"""Harnesses of remote stores: `RedisHarness`, with a redis-server of its own, and `ObjectHarness`,
in a folder.
"""

from __future__ import annotations

import atexit
import hashlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from flexkv.backends.remote.heads import HEAD
from flexkv.model import KVSpec
from flexkv.protocols import Services, StorageBackend
from flexkv.testing.harness import Bytes, StorageHarness, Unsupported

_START_S = 10.0


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RedisServer:
    """A redis-server on 127.0.0.1, without persistence. `stop` ends it; so does our own end.

    Raises:
        Unsupported: there is no redis-server here.
    """

    def __init__(self, *options: str, port: int = 0, file: Path | None = None) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            raise Unsupported("install redis-server (or valkey-server) to verify the redis store")
        self.port = port or free_port()
        self.folder = tempfile.mkdtemp(prefix="flexkv-redis-")
        command = [program, *([str(file)] if file else []), "--port", str(self.port)]
        command += ["--bind", "127.0.0.1", "--save", "", "--dir", self.folder]
        command += ["--daemonize", "no", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        atexit.register(self.stop)
        self._await()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"redis://127.0.0.1:{self.port}/0"

    def _await(self) -> None:
        until = time.monotonic() + _START_S
        while time.monotonic() < until and self.process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.01)
        raise RuntimeError(f"redis-server does not answer on port {self.port}")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep it from running: connections stay, nothing is answered."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End it and remove what it left. Twice is fine."""
        if self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class RedisHarness(StorageHarness):
    """The `redis` store, with a server that all tests of a process share.

    Option `url`: a server that runs already.
    """

    persistent = False  # blocks are found by their keys, not by opening
    exclusive = False
    _server: RedisServer | None = None

    def __init__(self, plugin: Any, options: Any = None) -> None:
        options = dict(options or {})
        if "url" not in options:
            if RedisHarness._server is None:
                RedisHarness._server = RedisServer()
            options["url"] = RedisHarness._server.url
        super().__init__(plugin, options)

    def settings(self, place: Path) -> dict[str, Any]:
        """Each folder is a cache of its own on the server."""
        return {"prefix": _prefix(place)} | self.options

    def read_back(self, place: Path, slot: int, key: NDArray[np.uint64], spec: KVSpec) -> Bytes:
        """Ask over a connection of our own."""
        value = self._ask(b"GET", self._name(place, key))
        return np.frombuffer(value, np.uint8)[HEAD.itemsize :]

    def write_raw(
        self, place: Path, slot: int, key: NDArray[np.uint64], spec: KVSpec, data: Bytes
    ) -> None:
        """Overwrite the value behind its head."""
        offset = str(HEAD.itemsize).encode()
        self._ask(b"SETRANGE", self._name(place, key), offset, data.tobytes())

    def _name(self, place: Path, key: NDArray[np.uint64]) -> bytes:
        pattern = f"{_prefix(place)}:*:{key.tobytes().hex()}"
        answer = self._ask(b"KEYS", pattern.encode())
        name = answer.split(b"\r\n")[1]  # an array of one text
        return name

    def _ask(self, *words: bytes) -> bytes:
        """Send one command; what stands behind the first line of the answer."""
        command = b"*%d\r\n" % len(words)
        command += b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
        where = urlsplit(self.options["url"])
        with socket.create_connection((where.hostname, where.port or 6379)) as connection:
            connection.sendall(command + b"QUIT\r\n")
            answer = bytearray()
            while received := connection.recv(1 << 16):
                answer += received
        _, _, rest = bytes(answer.removesuffix(b"+OK\r\n")).partition(b"\r\n")
        return rest.removesuffix(b"\r\n")

    def hold(self, backend: StorageBackend, services: Services) -> AbstractContextManager[None]:
        """Stop the server's process."""
        if self._server is None:
            raise Unsupported("a server that we did not start is not stopped")
        return self._server.paused()


class ObjectHarness(StorageHarness):
    """The `objects` store in a folder of the test, as on a file system that machines share."""

    persistent = False  # blocks are found by their keys, not by opening
    exclusive = False
    pool_threads = 32  # of obstore's runtime

    def settings(self, place: Path) -> dict[str, Any]:
        """Use `place`."""
        return {"url": place.as_uri()} | self.options

    def read_back(self, place: Path, slot: int, key: NDArray[np.uint64], spec: KVSpec) -> Bytes:
        """Read the file."""
        return np.fromfile(self._file(place, key), np.uint8)[HEAD.itemsize :]

    def write_raw(
        self, place: Path, slot: int, key: NDArray[np.uint64], spec: KVSpec, data: Bytes
    ) -> None:
        """Overwrite the file behind its head."""
        with self._file(place, key).open("r+b") as file:
            file.seek(HEAD.itemsize)
            file.write(data.tobytes())

    def _file(self, place: Path, key: NDArray[np.uint64]) -> Path:
        (path,) = place.rglob(key.tobytes().hex())
        return path


def _prefix(place: Path) -> str:
    return "kit-" + hashlib.blake2b(str(place).encode(), digest_size=8).hexdigest()
