"""Mooncake for tests: `MooncakeServer` (a master, and a machine that lends memory) and the harness
`MooncakeHarness` of the store `mooncake`.
"""

from __future__ import annotations

import atexit
import hashlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv.backends.remote.heads import HEAD
from flexkv.backends.remote.mooncake_process import HINT
from flexkv.model import KVSpec
from flexkv.protocols import Services, StorageBackend
from flexkv.testing.harness import Bytes, StorageHarness, Unsupported
from flexkv.testing.remote import free_port

_START_S = 20.0

# Lends memory; on stdin "get NAME" and "set NAME HEX", answered by a line of hexadecimal digits.
_LENDER = """
import os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
host, master, size = sys.argv[1:]
code = store.setup(host, "P2PHANDSHAKE", int(size), 16 << 20, "tcp", "", master)
print(f"ready {code}", flush=True)
for line in sys.stdin:
    verb, name, *value = line.split()
    if verb == "set":
        store.remove(name, True)
        print(store.put(name, bytes.fromhex(value[0])), flush=True)
    else:
        print(store.get(name).hex(), flush=True)
os._exit(0)
"""


class MooncakeServer:
    """A mooncake_master and one process that lends `segment_bytes`, on 127.0.0.1.

    `stop` ends them; so does our own end.

    Raises:
        Unsupported: Mooncake is not installed, or does not run here.
    """

    def __init__(self, segment_bytes: int = 256 << 20, host: str = "127.0.0.1") -> None:
        found = find_spec("mooncake")
        if found is None or not found.submodule_search_locations:
            raise Unsupported(f"to verify the mooncake store: {HINT}")
        self._program = Path(found.submodule_search_locations[0]) / "mooncake_master"
        self.host, self.port, self.metrics_port = host, free_port(), free_port()
        self._segment_bytes = segment_bytes
        self._running: list[subprocess.Popen[Any]] = []
        self.folder = tempfile.mkdtemp(prefix="flexkv-mooncake-")
        atexit.register(self.stop)
        self.start_master()
        self.start_lender()

    @property
    def address(self) -> str:
        """Where the master answers, host:port."""
        return f"{self.host}:{self.port}"

    def start_master(self) -> None:
        """Start the master, empty."""
        command = [str(self._program), f"--rpc_address={self.host}", f"--rpc_port={self.port}"]
        command += [f"--metrics_host={self.host}", f"--metrics_port={self.metrics_port}"]
        command += ["--enable_metric_reporting=false", "--client_ttl=3", "--rpc_thread_num=2"]
        log = Path(self.folder, "master.log")
        with log.open("ab") as file:
            self.master = subprocess.Popen(command, stdout=file, stderr=file, cwd=self.folder)
        self._running.append(self.master)
        until = time.monotonic() + _START_S
        while time.monotonic() < until and self.master.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex((self.host, self.port)) == 0:
                    return
            with suppress(subprocess.TimeoutExpired):
                self.master.wait(0.01)
        raise Unsupported(f"mooncake_master does not run here: {log.read_text()[-500:]}")

    def start_lender(self) -> None:
        """Start the process that lends memory."""
        arguments = [self.host, self.address, str(self._segment_bytes)]
        self.lender = subprocess.Popen(
            [sys.executable, "-c", _LENDER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=self.folder,
        )
        self._running.append(self.lender)
        if self._heard("ready") != "ready 0":
            raise Unsupported("Mooncake does not run here: its store cannot be set up")

    def ask(self, *words: str) -> str:
        """Have the lender do something; its answer."""
        assert self.lender.stdin is not None
        self.lender.stdin.write(" ".join(words) + "\n")
        self.lender.stdin.flush()
        return self._heard("")

    def _heard(self, beginning: str) -> str:
        assert self.lender.stdout is not None
        for line in self.lender.stdout:  # Mooncake prints things of its own
            if beginning in line:
                return line[line.index(beginning) :].strip()
        raise RuntimeError("the lender ended")

    def names(self) -> list[str]:
        """Of all objects."""
        url = f"http://{self.address.rpartition(':')[0]}:{self.metrics_port}/get_all_keys"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return sorted(answer.read().decode().split())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep master and lender from running: connections stay, nothing is answered."""
        for process in self._running:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in self._running:
                process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End both with SIGKILL. Twice is fine."""
        for process in self._running:
            if process.poll() is None:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
        self._running.clear()

    def stop(self) -> None:
        """End both and remove what they left. Twice is fine."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class MooncakeHarness(StorageHarness):
    """The `mooncake` store, with a master and a lender that all tests of a process share.

    Option `master`: one that runs already; then there is no back door.
    """

    persistent = False  # blocks are found by their keys, not by opening
    exclusive = False
    _server: MooncakeServer | None = None

    def __init__(self, plugin: Any, options: Any = None) -> None:
        options = dict(options or {})
        if "master" not in options:
            if MooncakeHarness._server is None:
                MooncakeHarness._server = MooncakeServer()
            options["master"] = MooncakeHarness._server.address
        super().__init__(plugin, options)

    def settings(self, place: Path) -> dict[str, Any]:
        """Each folder is a cache of its own on the server."""
        return {"prefix": _prefix(place)} | self.options

    def read_back(self, place: Path, slot: int, key: NDArray[np.uint64], spec: KVSpec) -> Bytes:
        """Have the lender read it."""
        server, name = self._object(place, key)
        return np.frombuffer(bytes.fromhex(server.ask("get", name)), np.uint8)[HEAD.itemsize :]

    def write_raw(
        self, place: Path, slot: int, key: NDArray[np.uint64], spec: KVSpec, data: Bytes
    ) -> None:
        """Have the lender put another object with the same head in its place."""
        server, name = self._object(place, key)
        head = server.ask("get", name)[: 2 * HEAD.itemsize]
        answer = server.ask("set", name, head + data.tobytes().hex())
        assert answer == "0", f"the object was not replaced: {answer}"

    def _object(self, place: Path, key: NDArray[np.uint64]) -> tuple[MooncakeServer, str]:
        server = self._ours()
        begin, end = f"{_prefix(place)}:", f":{key.tobytes().hex()}"
        (name,) = (word for word in server.names() if word.startswith(begin) and word.endswith(end))
        return server, name

    def hold(self, backend: StorageBackend, services: Services) -> AbstractContextManager[None]:
        """Stop the processes of the server."""
        return self._ours().paused()

    def _ours(self) -> MooncakeServer:
        server = MooncakeHarness._server
        if server is None or server.address != self.options["master"]:
            raise Unsupported("there is no back door to a server that we did not start")
        return server


def _prefix(place: Path) -> str:
    return "kit-" + hashlib.blake2b(str(place).encode(), digest_size=8).hexdigest()
