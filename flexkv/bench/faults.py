"""What a node feels of faults in its cluster: `run`.

Two real nodes (processes) on a real redis-server, with a relay on the way to the owner of blocks.
Node b loads a prompt of its own and prompts of a's at the same time; for each fault its local hits
in the healthy cluster just before are compared with those while the fault lasts.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flexkv.bench.fault_link import Relay
from flexkv.bench.fault_node import LOCAL, REMOTE, Node
from flexkv.bench.report import Progress, Result, median, percentile
from flexkv.errors import ConfigError
from flexkv.testing.harness import Unsupported
from flexkv.testing.remote import RedisServer, free_port

FAULTS = (
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
_RECOVERY_S = 60.0


def run(
    progress: Progress,
    *,
    faults: Sequence[str] = FAULTS,
    phase_s: float = 5.0,
    pause_s: float = 60.0,
) -> list[Result]:
    """Measure the p99 of local hits in milliseconds during each fault; the ratio is to the healthy
    phase just before.

    `params` say the p50 and its ratio, how many gets of the other node's blocks were served and
    missed, the longest of them, wrong blocks, hangs, local misses, pins left behind on both nodes,
    and the seconds until blocks of the other node came again. `owner_stopped` lasts `pause_s`, all
    others `phase_s`.

    Raises:
        ConfigError: there is no such fault, or no redis-server here.
        StorageError: a node of the benchmark has ended.
    """
    if unknown := [name for name in faults if name not in FAULTS]:
        raise ConfigError(f"faults must be some of {', '.join(FAULTS)}, got {unknown[0]!r}")
    results = []
    with _cluster() as cluster:
        for number, name in enumerate(faults):
            progress(name.replace("_", " "), number, len(faults))
            results.append(cluster.suffer(name, phase_s, pause_s))
    return results


class _Cluster:
    """Two nodes, the relay in front of a, and their directory."""

    def __init__(self, redis: RedisServer) -> None:
        self.redis, self._port = redis, free_port()
        self.relay = Relay(self._port)
        self._settings = {
            "cluster_redis_url": redis.url,
            "key_secret": "the secret of a benchmark",
            "peer_blocks": 4096,
            "heartbeat_ms": 200,
            "node_ttl_ms": 3000,
            "peer_timeout_ms": 500,
        }
        self.b = Node("b", self._settings | {"cluster_listen": "127.0.0.1:0"})
        self.b.ask("put", LOCAL)
        self.start_owner()
        self.b.ask("recover", _RECOVERY_S)
        self.b.ask("phase", 1.0)

    def start_owner(self) -> None:
        """Start node a, which computes everything that b will ask for."""
        place = {
            "cluster_listen": f"127.0.0.1:{self._port}",
            "cluster_advertise": f"127.0.0.1:{self.relay.port}",
        }
        self.a = Node("a", self._settings | place)
        for number in range(REMOTE):
            self.a.ask("put", number)

    def suffer(self, name: str, phase_s: float, pause_s: float) -> Result:
        """Compare a healthy phase with one in which something is wrong, and heal it."""
        healthy = self.b.ask("phase", phase_s)
        seconds = pause_s if name == "owner_stopped" else phase_s
        self.b.tell("phase", seconds)
        break_it, heal = self._ways(name)
        break_it()
        faulty = self.b.hear(seconds + 120)
        heal()
        after = self.b.ask("recover", _RECOVERY_S)
        pins = self.b.ask("idle", 15.0) + self.a.ask("idle", 15.0)
        return _result(name, seconds, healthy, faulty, after, pins)

    def _ways(self, name: str) -> tuple[Callable[[], None], Callable[[], None]]:
        """How a fault begins and how it ends."""
        if name.startswith("peer_"):
            return (lambda: self._mood(name.removeprefix("peer_"))), (lambda: self._mood("good"))
        return {
            "none": (_nothing, _nothing),
            "owner_killed": (self._kill_owner, self.start_owner),
            "owner_stopped": (
                lambda: self._signal(signal.SIGSTOP),
                lambda: self._signal(signal.SIGCONT),
            ),
            "redis_killed": (self.redis.kill, self._restart_redis),
            "redis_stopped": (
                lambda: self.redis.process.send_signal(signal.SIGSTOP),
                lambda: self.redis.process.send_signal(signal.SIGCONT),
            ),
            "redis_flushed": (self._flush, _nothing),
        }[name]

    def _mood(self, mood: str) -> None:
        self.relay.feel(mood)

    def _kill_owner(self) -> None:
        self.a.kill()

    def _signal(self, number: signal.Signals) -> None:
        assert self.a.process.pid is not None
        os.kill(self.a.process.pid, number)

    def _restart_redis(self) -> None:
        self.redis = RedisServer(port=self.redis.port)

    def _flush(self) -> None:
        with socket.create_connection(("127.0.0.1", self.redis.port), 5) as link:
            link.sendall(b"*1\r\n$8\r\nFLUSHALL\r\n")
            link.recv(64)

    def close(self) -> None:
        """End everything."""
        for node in (self.a, self.b):
            node.kill()
        self.relay.close()
        self.redis.stop()


def _nothing() -> None:
    """Leave everything as it is."""


@contextmanager
def _cluster() -> Iterator[_Cluster]:
    try:
        redis = RedisServer()
    except Unsupported as error:
        raise ConfigError("install redis-server (or valkey-server) for this benchmark") from error
    try:
        cluster = _Cluster(redis)
        try:
            yield cluster
        finally:
            cluster.close()
    finally:
        redis.stop()


def _result(
    name: str,
    seconds: float,
    healthy: dict[str, Any],
    faulty: dict[str, Any],
    after: dict[str, Any],
    pins: int,
) -> Result:
    before, during = healthy["local_ms"], faulty["local_ms"]
    phases = (healthy, faulty, after)
    recovery_s = after["recovery_s"]
    params = {
        "fault": name,
        "seconds": seconds,
        "p50_ms": round(median(during), 3),
        "p50_ratio": round(median(during) / median(before), 3),
        "local_missed": healthy["local_missed"] + faulty["local_missed"],
        "served": faulty["served"],
        "missed": faulty["missed"],
        "longest_remote_ms": round(max(faulty["remote_ms"], default=0.0), 1),
        "healthy_served": healthy["served"],
        "healthy_missed": healthy["missed"],
        "wrong_blocks": sum(phase["wrong"] for phase in phases),
        "hangs": sum(phase["hangs"] for phase in phases),
        "pins_left": pins,
        "recovery_s": None if recovery_s is None else round(recovery_s, 2),
    }
    p99, limit = percentile(during, 99), percentile(before, 99)
    return Result(
        "local_p99", p99, "ms", limit, ratio=p99 / limit, samples=len(during), params=params
    )
