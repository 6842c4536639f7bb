"""Where `flexkv bench faults` happens: `PEERS`, `FAILOVER` and `STORE`, each with its faults.

A site is real processes: nodes, a redis-server (or two and a Sentinel), a relay on the way to the
owner of blocks, or a Mooncake master with a process that lends memory. `open_site` starts one;
`Site.ways(fault)` says how a fault begins and how it ends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from flexkv.bench.fault_link import Relay
from flexkv.bench.fault_node import LOCAL, REMOTE, Node
from flexkv.errors import ConfigError, StorageError
from flexkv.testing.harness import Unsupported
from flexkv.testing.mooncake import MooncakeServer
from flexkv.testing.remote import RedisServer, free_port

RECOVERY_S = 60.0
_SENTINEL_S = 20.0
_LOOK_S = 2.0
Ways = tuple[Callable[[], object], Callable[[], object]]


class Site:
    """Node b, whose local hits are measured, and what it loads other blocks from."""

    b: Node
    nodes: list[Node]

    def ways(self, fault: str) -> Ways:
        """How a fault begins and how it ends."""
        raise NotImplementedError

    def recover(self) -> dict[str, Any]:
        """Load until blocks come from elsewhere again; what happened, and the seconds it took."""
        found: dict[str, Any] = self.b.ask("recover", RECOVERY_S)
        return found

    def close(self) -> None:
        """End the nodes."""
        for node in self.nodes:
            node.kill()


class _Pair(Site):
    """Node a has computed what b asks for; `directory` is where they find each other."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self._port = free_port()
        self.relay = Relay(self._port)
        stack.callback(self.relay.close)
        self._settings = {
            "cluster_redis_url": url,
            "key_secret": "the secret of a benchmark",
            "peer_blocks": 4096,
            "heartbeat_ms": 200,
            "node_ttl_ms": 3000,
            "peer_timeout_ms": 500,
        }
        self.b = Node("b", self._settings | {"cluster_listen": "127.0.0.1:0"})
        self.nodes = [self.b]
        stack.callback(self.close)
        self.b.ask("put", LOCAL)
        self.start_owner()
        self.b.ask("recover", RECOVERY_S)
        self.b.ask("phase", 1.0)

    def start_owner(self) -> None:
        """Start node a, which computes everything that b will ask for."""
        place = {
            "cluster_listen": f"127.0.0.1:{self._port}",
            "cluster_advertise": f"127.0.0.1:{self.relay.port}",
        }
        self.a = Node("a", self._settings | place)
        self.nodes = [self.b, self.a]
        for number in range(REMOTE):
            self.a.ask("put", number)


class PeerSite(_Pair):
    """Two nodes on one redis-server."""

    faults: tuple[str, ...] = (
        "none",
        "owner_killed",
        "owner_stopped",
        "peer_cut",
        "peer_slow",
        "peer_garbage",
        "peer_closed",
        "redis_killed",
        "redis_stopped",
        "redis_flushed",
    )

    def __init__(self, stack: ExitStack) -> None:
        self.redis = RedisServer()
        stack.callback(lambda: self.redis.stop())
        super().__init__(self.redis.url, stack)

    def ways(self, fault: str) -> Ways:
        """How a fault begins and how it ends."""
        if fault.startswith("peer_"):
            mood = fault.removeprefix("peer_")
            return (lambda: self.relay.feel(mood)), (lambda: self.relay.feel("good"))
        return {
            "none": (_nothing, _nothing),
            "owner_killed": (lambda: self.a.kill(), self.start_owner),
            "owner_stopped": (
                lambda: self._signal(signal.SIGSTOP),
                lambda: self._signal(signal.SIGCONT),
            ),
            "redis_killed": (self.redis.kill, self._restart_redis),
            "redis_stopped": (
                lambda: self.redis.process.send_signal(signal.SIGSTOP),
                lambda: self.redis.process.send_signal(signal.SIGCONT),
            ),
            "redis_flushed": (lambda: _say(self.redis.port, "FLUSHALL"), _nothing),
        }[fault]

    def _signal(self, number: signal.Signals) -> None:
        assert self.a.process.pid is not None
        os.kill(self.a.process.pid, number)

    def _restart_redis(self) -> None:
        self.redis = RedisServer(port=self.redis.port)


class FailoverSite(_Pair):
    """Two nodes on a redis-server with a replica, watched by a Sentinel."""

    faults: tuple[str, ...] = ("redis_failover",)

    def __init__(self, stack: ExitStack) -> None:
        def start(*options: str, **places: Any) -> RedisServer:
            server = RedisServer(*options, **places)
            stack.callback(server.stop)
            return server

        self._master, port = start(), free_port()
        of = ("--replicaof", "127.0.0.1", str(self._master.port))
        self._replica = start(*of, "--repl-diskless-sync-delay", "0")
        conf = Path(self._replica.folder, "sentinel.conf")
        conf.write_text(
            f"sentinel monitor kv 127.0.0.1 {self._master.port} 1\n"
            "sentinel down-after-milliseconds kv 500\nsentinel failover-timeout kv 2000\n"
        )
        _await(self._replica, "INFO replication", "master_link_status:up")
        start("--sentinel", port=port, file=conf)
        super().__init__(f"sentinel://127.0.0.1:{port}/kv", stack)

    def ways(self, fault: str) -> Ways:
        """The master is killed; the replica must have taken its place in the end."""
        return self._master.kill, lambda: _await(self._replica, "INFO replication", "role:master")


class StoreSite(Site):
    """One node with a Mooncake store, from which it loads what its host memory has no room for."""

    faults: tuple[str, ...] = ("mooncake_killed", "mooncake_stopped")

    def __init__(self, stack: ExitStack) -> None:
        self.store = MooncakeServer()
        stack.callback(self.store.stop)
        remote = {
            "remote_backend": "mooncake",
            "remote_cache_bytes": 128 << 20,
            "remote_options": {"master": self.store.address, "timeout_ms": 2000},
        }
        self.b = Node("b", remote)
        self.nodes = [self.b]
        stack.callback(self.close)
        self.b.ask("put", LOCAL)
        self._fill()
        self.b.ask("phase", 1.0)

    def ways(self, fault: str) -> Ways:
        """Master and lender end (an empty master comes in the end), or both stand still."""
        if fault == "mooncake_killed":
            return self.store.kill, self._restart
        still = self.store.paused()
        return still.__enter__, lambda: still.__exit__(None, None, None)

    def recover(self) -> dict[str, Any]:
        """The same; what the store has lost is computed and stored again, until it takes it."""
        began = time.monotonic()
        wrong = hangs = 0
        while True:
            self._fill()
            found: dict[str, Any] = self.b.ask("recover", _LOOK_S)
            wrong, hangs = wrong + found["wrong"], hangs + found["hangs"]
            took_s = time.monotonic() - began
            if found["served"] or took_s > RECOVERY_S:
                found |= {"wrong": wrong, "hangs": hangs}
                return found | {"recovery_s": took_s if found["served"] else None}

    def _fill(self) -> None:
        """Compute everything, no faster than the store takes it; what is local stays in use."""
        for number in range(REMOTE):
            self.b.ask("put", number)
            self.b.ask("idle", 5.0)
            self.b.ask("put", LOCAL)

    def _restart(self) -> None:
        self.store.start_master()
        self.store.start_lender()


SITES: tuple[type[PeerSite | FailoverSite | StoreSite], ...] = (PeerSite, FailoverSite, StoreSite)


@contextmanager
def open_site(kind: type[PeerSite | FailoverSite | StoreSite]) -> Iterator[Site]:
    """Start everything of a site; end it behind the body.

    Raises:
        ConfigError: a program that it needs is not installed.
    """
    with ExitStack() as stack:
        try:
            site = kind(stack)
        except Unsupported as error:
            raise ConfigError(str(error)) from error
        yield site


def _nothing() -> None:
    """Leave everything as it is."""


def _say(port: int, line: str) -> str:
    """One command to a redis-server, and the beginning of its answer."""
    with socket.create_connection(("127.0.0.1", port), 5) as link:
        link.sendall(line.encode() + b"\r\n")
        return link.recv(1 << 16).decode()


def _await(server: RedisServer, line: str, wanted: str) -> None:
    until = time.monotonic() + _SENTINEL_S
    while wanted not in _say(server.port, line):
        if time.monotonic() > until:
            raise StorageError(f"a redis-server is not {wanted} after {_SENTINEL_S} s")
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(0.05)
