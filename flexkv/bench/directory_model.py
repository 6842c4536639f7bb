"""A model of what the directory costs: `cost` (one node and the server, by the number of nodes),
`model` (a table of it). Its constants are counted from the wire format or measured by
`flexkv bench directory`; docs/distributed.md says which.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexkv.bench.report import Result

KEY_BYTES = 16
MESSAGE_BYTES = 160  # of a message in a log, beside its keys: command, names, envelope
STREAM_BYTES = 75  # of one log in the command that reads all logs: its name and a position
MEMBER_BYTES = 45  # of one node in a heartbeat's answer
BEAT_BYTES = 900  # of a heartbeat's commands
SNAPSHOT_SHARE = 0.25
APPLY_US = 1.0  # of a follower's CPU, for one changed block of another node
MESSAGE_US = 120.0  # of a follower's CPU, for one message, and
PUBLISH_US = 400.0  # of a publisher's, beside
SERVER_BYTES_PER_S = 1e9  # what one Redis thread sends


@dataclass(frozen=True, slots=True)
class Cost:
    """Per second, of one node; `server_bytes` is what all nodes together have the server send, and
    `memory_bytes` what it holds for them.
    """

    messages: float
    sent_bytes: float
    received_bytes: float
    commands: float
    cores: float
    server_bytes: float
    memory_bytes: float


def cost(
    nodes: int,
    blocks: int,
    changes_per_s: float,
    *,
    messages_per_s: float,
    reads_per_s: float,
    heartbeats_per_s: float = 1.0,
) -> Cost:
    """Say what `nodes` nodes of `blocks` blocks cost, of which each changes `changes_per_s`.

    A change is sent once and read by every other node; a snapshot of all blocks is written each
    time SNAPSHOT_SHARE of them was logged, so it adds 1 / SNAPSHOT_SHARE keys per change, whatever
    is held.
    """
    log = changes_per_s * KEY_BYTES + messages_per_s * MESSAGE_BYTES
    snapshots = changes_per_s / SNAPSHOT_SHARE * KEY_BYTES
    reading = reads_per_s * nodes * STREAM_BYTES
    beats = heartbeats_per_s * BEAT_BYTES
    received = nodes * log + heartbeats_per_s * nodes * MEMBER_BYTES
    follow_us = nodes * (changes_per_s * APPLY_US + messages_per_s * MESSAGE_US)
    return Cost(
        messages=messages_per_s,
        sent_bytes=log + snapshots + reading + beats,
        received_bytes=received,
        commands=messages_per_s + reads_per_s + 10 * heartbeats_per_s,
        cores=(follow_us + messages_per_s * PUBLISH_US) / 1e6,
        server_bytes=nodes * received,
        memory_bytes=nodes * blocks * KEY_BYTES * (1 + 2 * SNAPSHOT_SHARE),
    )


def model() -> list[Result]:
    """Return the costs of 2 to 1,024 nodes of 10 million blocks."""
    results = []
    for changes in (100, 1000):
        for nodes in (2, 8, 32, 128, 256, 512, 1024):
            found = cost(nodes, 10_000_000, changes, messages_per_s=10.0, reads_per_s=20.0)
            params = {"nodes": nodes, "blocks": 10_000_000, "changes_per_s": changes}
            params["cores_percent"] = round(100 * found.cores)
            params["server_MB_per_s"] = round(found.server_bytes / 1e6)
            params["server_memory_GB"] = round(found.memory_bytes / 1e9)
            name = "model: received, per node"
            share = SERVER_BYTES_PER_S / nodes
            ratio = found.received_bytes / share
            results.append(
                Result(name, found.received_bytes, "B/s", limit=share, ratio=ratio, params=params)
            )
    return results
