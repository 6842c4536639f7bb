"""What flexkv counts: the names, kinds and labels of all metrics (`METRICS`)."""

from __future__ import annotations

from typing import Literal, NamedTuple

_SECONDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Series(NamedTuple):
    """One metric: kind, what it says, its labels in order; `bounds` are upper edges of buckets."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = _SECONDS


# Prometheus shows them as flexkv_NAME, counters as flexkv_NAME_total
METRICS: dict[str, Series] = {
    # what was asked for
    "transfers": Series("counter", "transfers that ended, and how", ("kind", "outcome")),
    "timed_out_transfers": Series("counter", "transfers that passed their deadline", ("kind",)),
    "expired_plans": Series("counter", "plans that were neither launched nor cancelled", ("kind",)),
    "refused_puts": Series("counter", "puts for which there was no room"),
    "queried_blocks": Series("counter", "blocks looked up"),
    "hit_blocks": Series("counter", "blocks that matches found readable"),
    # what became of it
    "tier_hit_blocks": Series("counter", "blocks to load, by the tier they were in", ("tier",)),
    "declined_blocks": Series("counter", "blocks not fetched: computed sooner", ("tier",)),
    "fetch_probes": Series("counter", "reads of a declined tier to see whether it is fast again"),
    "loaded_blocks": Series("counter", "blocks that gets brought to the device"),
    "stored_blocks": Series("counter", "blocks that puts brought to host memory"),
    "bypassed_blocks": Series("counter", "blocks of puts that the eviction policy refused"),
    "failed_blocks": Series("counter", "blocks whose move failed", ("source", "target")),
    "damaged_blocks": Series("counter", "blocks dropped for wrong bytes", ("tier",)),
    # what moved, and what had to go
    "transfer_blocks": Series("counter", "blocks moved", ("source", "target")),
    "transfer_ops": Series("counter", "copy operations", ("source", "target")),
    "transfer_bytes": Series("counter", "bytes moved", ("source", "target")),
    "evicted_blocks": Series("counter", "blocks evicted from a tier", ("tier",)),
    "dropped_blocks": Series("counter", "blocks of work given up under load", ("work",)),
    "lead_blocks": Series("counter", "blocks promoted because a hinted run is near"),
    "dropped_hint_blocks": Series("counter", "blocks of hints that found no room in their table"),
    # the directory of a cluster
    "directory_published_blocks": Series("counter", "blocks in messages of changes to others"),
    "directory_snapshots": Series("counter", "snapshots written for others"),
    "directory_applied_blocks": Series("counter", "holdings of others that were booked"),
    "directory_rebuilds": Series("counter", "nodes read from their snapshots"),
    "directory_gaps": Series("counter", "logs of others in which messages were missing"),
    "directory_rejected": Series("counter", "invalid records and messages", ("what",)),
    "directory_sent_bytes": Series("counter", "bytes of commands to the directory", ("link",)),
    "directory_received_bytes": Series("counter", "bytes of answers from it", ("link",)),
    "directory_commands": Series("counter", "commands to the directory", ("link",)),
    "directory_connected": Series("gauge", "whether the directory answers"),
    "directory_nodes": Series("gauge", "other nodes of the cluster"),
    "directory_lag_seconds": Series("histogram", "from a change here to its being read"),
    # blocks of other nodes
    "cluster_failures": Series("counter", "parts of a node in its cluster that crashed", ("part",)),
    "peer_read_blocks": Series("counter", "blocks asked of other nodes", ("status",)),
    "peer_requests": Series("counter", "requests to other nodes"),
    "peer_sent_blocks": Series("counter", "blocks sent to other nodes"),
    "peer_fallback_blocks": Series("counter", "blocks that TCP brought, not the courier"),
    "peer_strangers": Series("counter", "connections that were turned away"),
    "peer_unknown_blocks": Series("counter", "holdings that could not be kept", ("reason",)),
    "peer_nodes": Series("gauge", "other nodes that hold something"),
    "peer_leases": Series("gauge", "leases that other nodes hold"),
    # how long it took; part: exposed (somebody waited) or hidden (beside other work)
    "transfer_seconds": Series("histogram", "duration of a transfer", ("kind", "part")),
    # how it stands
    "tier_capacity_blocks": Series("gauge", "slots of a tier", ("tier",)),
    "tier_free_blocks": Series("gauge", "free slots of a tier", ("tier",)),
    "lane_queue_depth": Series("gauge", "requests waiting for a lane", ("lane",)),
    "lane_bytes_in_flight": Series("gauge", "bytes in flight in a lane", ("lane",)),
    "transfers_in_flight": Series("gauge", "transfers that have not ended", ("kind",)),
    "hints": Series("gauge", "retention hints that are alive"),
    "hinted_blocks": Series("gauge", "blocks of a tier that hints cover", ("tier",)),
    "held_blocks": Series("gauge", "blocks of a tier that leave after all others", ("tier",)),
    "spill_queue_blocks": Series("gauge", "blocks waiting to be spilled"),
    "fetch_bytes_per_s": Series("gauge", "reads of a tier as weighed; 0: unknown", ("tier",)),
    "fetch_latency_seconds": Series("gauge", "what a read takes beside its bytes", ("tier",)),
    "prefill_tokens_per_s": Series("gauge", "prefill rate as weighed; 0: unknown"),
    "index_blocks": Series("gauge", "entries of the index"),
    "pinned_blocks": Series("gauge", "pins held by transfers and plans"),
    "tickets_in_flight": Series("gauge", "batches of hardware work in flight"),
}
