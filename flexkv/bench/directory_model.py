"""A model of what the directory costs: `cost` (one node and the server, by the number of nodes),
`model` (a table of it). Its constants are counted from the wire format or measured by
`flexkv bench directory`; docs/directory.md says which.
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
BASE_CORES = 0.048  # of a node with no others: heartbeats, reads, 8 messages/s of its own
APPLY_US = 0.35  # of CPU, for one changed block of another node
MESSAGE_US = 500.0  # of CPU, for one message of another node
SERVER_BYTES_PER_S = 1e9  # what one Redis thread sends (flexkv bench remote)


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
    cores = BASE_CORES + follow_us / 1e6
    return Cost(
        messages=messages_per_s,
        sent_bytes=log + snapshots + reading + beats,
        received_bytes=received,
        commands=messages_per_s + reads_per_s + 10 * heartbeats_per_s,
        cores=cores,
        server_bytes=nodes * received,
        memory_bytes=nodes * blocks * KEY_BYTES * (1 + 2 * SNAPSHOT_SHARE),
    )


def model() -> list[Result]:
    """Return the costs of 2 to 1,024 nodes of 10 million blocks; the limit is the server's."""
    results = []
    for changes, messages, reads in ((100, 10.0, 50.0), (1000, 10.0, 50.0), (1000, 1.0, 1.0)):
        for nodes in (2, 8, 32, 128, 256, 512, 1024):
            rates = {"messages_per_s": messages, "reads_per_s": reads}
            found = cost(nodes, 10_000_000, changes, **rates)
            params = {"nodes": nodes, "changes_per_s": changes, "messages_per_s": messages}
            params["cores"] = round(found.cores, 2)
            params["server_MB_per_s"] = round(found.server_bytes / 1e6)
            params["server_memory_GB"] = round(found.memory_bytes / 1e9)
            limit = SERVER_BYTES_PER_S / nodes
            ratio = found.received_bytes / limit
            given = (found.received_bytes, "B/s", limit)
            results.append(Result("model: received, per node", *given, ratio=ratio, params=params))
    return results
