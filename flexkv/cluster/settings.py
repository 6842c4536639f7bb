"""What may be set for a cluster, and how its keys are called: `ClusterSettings`, `Names`.

All keys of a cluster have one hash tag, so that on Redis Cluster they share a slot: one XREAD over
the logs of all nodes is possible there only within a slot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from flexkv.backends.remote.settings import hidden, secret
from flexkv.backends.remote.urls import places
from flexkv.errors import ConfigError

_WORD = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NODE = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
_MEMBER = re.compile(rf"({_NODE.pattern})/([0-9a-f]{{16}})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Settings of the directory.

    `url` is as for the `redis` store, or cluster://host:port,host:port; a password may come from
    `password_file`. Clusters of another `name` or `prefix` on the same server never meet. A node
    shows each `heartbeat_ms` that it lives and counts as gone after `node_ttl_ms` without a sign.
    Changes are collected for `linger_ms`, up to `batch_blocks` of them in a message; when
    `snapshot_share` of what is held has been logged, a snapshot replaces the log. No answer of the
    server within `timeout_ms` is a failure; it is tried again after `retry_ms`, doubling up to 64
    times that.
    """

    url: str = hidden("redis://127.0.0.1:6379/0")
    username: str = ""
    password: str = hidden()
    password_file: str = ""
    prefix: str = "flexkv"
    name: str = "default"
    heartbeat_ms: int = 1000
    node_ttl_ms: int = 5000
    linger_ms: int = 10
    batch_blocks: int = 4096
    snapshot_share: float = 0.25
    timeout_ms: int = 2000
    retry_ms: int = 50

    def __post_init__(self) -> None:
        for name in ("prefix", "name"):
            if not _WORD.fullmatch(str(getattr(self, name))):
                raise ConfigError(
                    f"cluster: {name} must be a word of letters, digits, '.', '_', '-', "
                    f"got {getattr(self, name)!r}"
                )
        limits = {"heartbeat_ms": 3_600_000, "node_ttl_ms": 86_400_000, "linger_ms": 10_000}
        limits |= {"batch_blocks": 4096, "timeout_ms": 600_000, "retry_ms": 60_000}
        for name, most in limits.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(
                    f"cluster: {name} must be a whole number from 1 to {most}, got {value!r}"
                )
        if self.node_ttl_ms < 2 * self.heartbeat_ms:
            raise ConfigError(
                f"cluster: node_ttl_ms is {self.node_ttl_ms}, but must be at least two heartbeats "
                f"of {self.heartbeat_ms} ms"
            )
        if not 0 < self.snapshot_share <= 1:
            raise ConfigError(
                f"cluster: snapshot_share must be above 0 and at most 1, got {self.snapshot_share}"
            )
        self.places()
        self.secret()

    def places(self) -> dict[str, Any]:
        """Return what `url` says; see flexkv.backends.remote.urls."""
        return places(self.url, "cluster")

    def secret(self) -> str:
        """Return the password that was set, or "" to use that of the URL."""
        return secret(self.password, self.password_file)


class Names:
    """The keys of one cluster on the server."""

    def __init__(self, settings: ClusterSettings) -> None:
        base = f"{{{settings.prefix}:{settings.name}}}"
        self._base = base
        self.members = f"{base}:members"  # sorted set: member -> generation and heartbeat
        self.roster = f"{base}:roster"  # stream: whose record is new, who leaves, which epoch
        self.epoch = f"{base}:epoch"  # sorted set with one element, because ZADD GT never goes back
        self.draining = f"{base}:draining"  # set of members that are to drain

    def record(self, member: str) -> str:
        """The record of a node."""
        return f"{self._base}:node:{member}"

    def log(self, member: str, generation: int) -> str:
        """The stream of a node's changes."""
        return f"{self._base}:log:{member}:{generation}"

    def snapshot(self, member: str, generation: int, position: int) -> str:
        """The list of pieces of what a node held when its log was at `position`."""
        return f"{self._base}:snap:{member}:{generation}:{position}"


def check_node(name: str) -> str:
    """Return the name of a node; ConfigError if it cannot be one."""
    if not _NODE.fullmatch(name):
        raise ConfigError(
            f"cluster: a node's name has 1 to 128 letters, digits or any of '._:@-', got {name!r}"
        )
    return name


def member_of(node: str, incarnation: int) -> str:
    """How one life of a node is called on the server."""
    return f"{node}/{incarnation:016x}"


def is_member(text: str) -> bool:
    """Whether `text` can be what `member_of` returned."""
    return _MEMBER.fullmatch(text) is not None
