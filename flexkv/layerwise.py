"""First layers first: `cut_by_layers` turns a get's copies from the host into one per layer range.

An engine that waits for each layer as it comes to it computes the first ones while the last ones
are still being copied. What comes from a store goes to the device chunk by chunk, all layers at
once. Synchronous and deterministic.
"""

from __future__ import annotations

from dataclasses import replace

from flexkv.model import DEVICE, HOST, Copy, TransferGraph


def cut_by_layers(graph: TransferGraph, layers: int, chunk_blocks: int) -> TransferGraph:
    """Return the graph with long copies from host to device cut into ranges of the device's layers.

    Each range moves about as many bytes as `chunk_blocks` whole blocks, or one layer if that is
    more, for all blocks. Two ranges are under way at a time, so that the device does not wait for
    us in between. The last one, with which a block counts as loaded, starts when all others are
    over: one that fails must be known by then. 0 layers: nothing is cut.
    """
    if not layers:
        return graph
    ops: list[Copy] = []
    last: list[int] = []  # of each op of the graph: the number of its last part
    for op in graph.ops:
        parts = 1
        if op.source.place == HOST and op.target.place == DEVICE and not op.after:
            parts = max(1, min(layers, len(op) // chunk_blocks))
        if parts == 1:
            ops.append(replace(op, after=tuple(last[number] for number in op.after)))
        first = len(ops)
        for number in range(parts if parts > 1 else 0):
            span = layers * number // parts, layers * (number + 1) // parts
            before = range(max(first, len(ops) - 2), len(ops))  # the two that may be under way
            after = tuple(before if number == parts - 1 else before[:-1])
            joins = op.joins if number < 2 else ()
            ops.append(
                Copy(op.source, op.target, op.positions, after, op.landing, joins, span, layers)
            )
        last.append(len(ops) - 1)
    return replace(graph, ops=tuple(ops))
