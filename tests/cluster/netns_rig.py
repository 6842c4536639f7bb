"""Several hosts on one machine: network namespaces behind a router that loses packets on purpose.

`open_network` (hosts 10.77.0.1 ...; `Network.cut`, `heal`, `loss`, `spawn`) - `Node` (a manager in
a host of its own: `ask`) - `open_cluster` (a redis-server on host 1, nodes on the others).
Needs root, `ip` and /dev/net/tun; kernels without netem can do it, too.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

HERE = Path(__file__).parent
_networks = itertools.count()
SOON_S = 40.0


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Network:
    """Hosts 1 ... `hosts`, each of which reaches each."""

    def __init__(self, hosts: int, stack: contextlib.ExitStack) -> None:
        tag = f"fx{os.getpid() % 100_000}{next(_networks)}"
        self.spaces = {number: f"{tag}-{number}" for number in range(1, hosts + 1)}
        self._stack = stack
        for space in self.spaces.values():
            _ip("netns", "add", space)
            stack.callback(_ip, "netns", "del", space)
        self._router = self._start(
            [sys.executable, str(HERE / "netns_router.py"), *self.spaces.values()]
        )
        self._heard()
        for number, space in self.spaces.items():
            _ip("link", "set", "dev", space, "netns", space)
            _ip("-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", space)
            for device in ("lo", space):
                _ip("-n", space, "link", "set", "dev", device, "up")

    def cut(self, one: int, other: int) -> None:
        """Let nothing through between two hosts, without telling them."""
        self._tell(f"cut {one} {other}")

    def heal(self) -> None:
        """Let everything through again."""
        self._tell("heal")

    def loss(self, part: float) -> None:
        """Lose this part of all packets."""
        self._tell(f"loss {part}")

    def spawn(self, host: int, command: list[str]) -> subprocess.Popen[str]:
        """Run a program on a host."""
        return self._start(["ip", "netns", "exec", self.spaces[host], *command])

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parent}"},
        )
        self._stack.callback(_end, process)
        return process

    def _tell(self, line: str) -> None:
        print(line, file=_pipe(self._router.stdin), flush=True)
        self._heard()

    def _heard(self) -> None:
        assert _pipe(self._router.stdout).readline() == "ok\n", "the router has ended"


class Node:
    """A manager on a host of its own."""

    def __init__(self, network: Network, host: int, settings: dict[str, Any]) -> None:
        command = [sys.executable, str(HERE / "netns_node.py"), json.dumps(settings)]
        self._process = network.spawn(host, command)

    def ask(self, *words: Any) -> dict[str, Any]:
        """Have it do something."""
        print(*words, file=_pipe(self._process.stdin), flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next thing that it says."""
        line = _pipe(self._process.stdout).readline()
        assert line, f"the node has ended with {self._process.wait()}"
        found: dict[str, Any] = json.loads(line)
        return found

    def until(self, blocks: int, *words: Any) -> None:
        """Ask for a match until it has so many blocks."""
        until = time.monotonic() + SOON_S
        while (found := self.ask("match", *words)["blocks"]) != blocks:
            assert time.monotonic() < until, f"it matches {found} blocks, not {blocks}"

    def end(self) -> None:
        """Close it; nothing may be left pinned (the rig looks)."""
        print("end", file=_pipe(self._process.stdin), flush=True)
        assert self._process.wait(60) == 0


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


@contextlib.contextmanager
def open_network(hosts: int) -> Iterator[Network]:
    """Make hosts; skips where that is not permitted."""
    if os.geteuid() or not shutil.which("ip") or not Path("/dev/net/tun").exists():
        pytest.skip("hosts as network namespaces need root, ip (iproute2) and /dev/net/tun")
    with contextlib.ExitStack() as stack:
        try:
            yield Network(hosts, stack)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")


@contextlib.contextmanager
def open_cluster(nodes: int, **settings: Any) -> Iterator[tuple[Network, list[Node]]]:
    """A redis-server on host 1 and nodes on the hosts behind it."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("install redis-server (or valkey-server) to test clusters")
    with open_network(nodes + 1) as network:
        words = ["--bind", "10.77.0.1", "--protected-mode", "no", "--save", "", "--dir", "/tmp"]
        network.spawn(1, [program, *words])
        made = []
        for host in range(2, nodes + 2):
            mine = {
                "cluster_redis_url": "redis://10.77.0.1:6379/0",
                "cluster_listen": f"10.77.0.{host}:0",
                "node_name": f"node-{host}",
                "peer_blocks": 256,
                "key_secret": "a secret of these tests",
                "heartbeat_ms": 200,
                "node_ttl_ms": 3000,
                "host": 96,
                "device": 8,
            }
            made.append(Node(network, host, mine | settings))
        for node in made:
            assert node.answer() == {"ready": True}
        yield network, made
        network.heal()
        network.loss(0)
        for node in made:
            node.end()
