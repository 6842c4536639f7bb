"""Who reads which block in which step: Workload, Access, sparse, prototype, attention.

A block is `tokens_per_block` tokens of one sequence: of one layer and one head where reads are
sparse, of all layers and heads where real attention reads everything. Sequences decode in batches;
the next batch starts when the last one is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import ConfigError
from flexkv.sim.compute import ComputeModel

Ids = NDArray[np.int64]
TOKENS_PER_BLOCK = 16
_RECENT, _WARM_BACK, _COLD_STRIDE = 3, 8, 11  # blocks, of the public prototype's workload


@dataclass(frozen=True, slots=True)
class Access:
    """What one step reads, in order; `streams` says who asks (one cursor of one layer)."""

    blocks: Ids
    layers: Ids  # -1: a block of all layers
    streams: Ids


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that decode together from step `first` for `steps` steps."""

    first: int
    steps: int
    sequences: tuple[int, ...]


@dataclass
class Workload:
    """A table of blocks and who reads them.

    Arrays by block: `sequence`, `index` (its place in the sequence), `distance_tokens` (how far
    behind the first decoded token it starts; those ahead count from the start of the sequence).
    """

    name: str
    layers: int
    block_bytes: float
    parts: int  # requests per block: layers x heads where a block spans them
    batches: list[Batch]
    contexts: list[int]  # tokens before the first decoded one
    counts: list[int]  # blocks of a sequence (per layer)
    spans_layers: bool
    compute_s_per_access: float = 0.0
    compute: ComputeModel | None = None
    from_start: bool = False  # decode starts at token 0 of a context that exists already

    def __post_init__(self) -> None:
        per = np.array(self.counts, np.int64) * (1 if self.spans_layers else self.layers)
        self.base = np.concatenate(([0], np.cumsum(per)))
        self.sequence = np.repeat(np.arange(len(per)), per)
        within = np.arange(int(self.base[-1])) - self.base[self.sequence]
        counts = np.array(self.counts, np.int64)[self.sequence]
        self.index = within % counts
        start = self.index * TOKENS_PER_BLOCK
        context = np.array(self.contexts, np.int64)[self.sequence]
        self.distance_tokens = start if self.from_start else context - start
        self.steps = sum(batch.steps for batch in self.batches)
        self._batch_of = np.repeat(np.arange(len(self.batches)), [b.steps for b in self.batches])

    @property
    def blocks(self) -> int:
        """Return how many blocks there are."""
        return int(self.base[-1])

    @property
    def weight_bytes(self) -> float:
        """Return the bytes of weights that each step reads."""
        return self.compute.model.weight_bytes() if self.compute else 0.0

    def batch(self, step: int) -> Batch:
        """Return the batch that decodes in a step."""
        return self.batches[int(self._batch_of[step])]

    def position(self, step: int, sequence: int) -> int:
        """Return the token that a sequence decodes in a step of its batch."""
        start = 0 if self.from_start else self.contexts[sequence]
        batch = self.batch(step)
        token = step - batch.first
        return start + (token * TOKENS_PER_BLOCK // 2 if self.from_start else token)

    def _ids(self, sequence: int, columns: Ids) -> Ids:
        """Return the blocks of `columns` (places in the sequence), layer by layer."""
        layer = np.arange(self.layers, dtype=np.int64)[:, None] * self.counts[sequence]
        found: Ids = (self.base[sequence] + layer + columns[None, :]).ravel()
        return found

    def window(self, step: int, tokens: int) -> Ids:
        """Return the newest `tokens` of each sequence as blocks."""
        found = []
        for sequence in self.batch(step).sequences:
            current = self.position(step, sequence) // TOKENS_PER_BLOCK
            first = max(0, current - tokens // TOKENS_PER_BLOCK + 1)
            columns = np.arange(first, current + 1)
            found.append(
                self.base[sequence] + columns if self.spans_layers else self._ids(sequence, columns)
            )
        return np.concatenate(found)

    def access(self, step: int) -> Access:
        """Return what a step reads."""
        if self.spans_layers:
            blocks = np.concatenate(
                [
                    self.base[s] + np.arange(self.position(step, s) // TOKENS_PER_BLOCK + 1)
                    for s in self.batch(step).sequences
                ]
            )
            return Access(blocks, np.full(len(blocks), -1), blocks)
        parts = [self._sparse(step, s, place) for place, s in enumerate(self.batch(step).sequences)]
        blocks, layers, streams = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Access(blocks, layers, streams)

    def _sparse(self, step: int, sequence: int, place: int) -> tuple[Ids, Ids, Ids]:
        current = self.position(step, sequence) // TOKENS_PER_BLOCK
        there = self.counts[sequence] if self.from_start else current + 1
        cold = ((step - self.batch(step).first) * _COLD_STRIDE) % there
        recent = [current - back for back in range(_RECENT)]
        columns = np.array([*recent, max(0, current - _WARM_BACK), cold], np.int64)
        roles = np.flatnonzero(columns >= 0)
        columns = columns[roles]
        layers = np.repeat(np.arange(self.layers, dtype=np.int64), len(columns))
        streams = (place * self.layers + layers) * 8 + np.tile(roles, self.layers)
        return self._ids(sequence, columns), layers, streams

    def written_bytes(self, step: int) -> float:
        """Return the KV that a step writes: one token of each sequence."""
        per_token = self.block_bytes / TOKENS_PER_BLOCK
        layers = 1 if self.spans_layers else self.layers
        return per_token * layers * len(self.batch(step).sequences)

    def fresh(self, step: int) -> Ids:
        """Return the blocks that a step writes into."""
        return self.window(step, TOKENS_PER_BLOCK)

    def compute_seconds(self, step: int, accesses: int) -> float:
        """Return the time that a step computes, transfers apart."""
        if self.compute is None:
            return accesses * self.compute_s_per_access
        contexts = [self.position(step, s) for s in self.batch(step).sequences]
        return self.compute.flops_seconds(self.compute.decode_flops(contexts))


def _batches(sequences: int, steps: Sequence[int], batch: int) -> list[Batch]:
    found, first = [], 0
    for start in range(0, sequences, batch):
        together = tuple(range(start, min(start + batch, sequences)))
        length = min(steps[s] for s in together)
        found.append(Batch(first, length, together))
        first += length
    return found


def _checked(contexts: Sequence[int], steps: int, batch: int) -> list[int]:
    if not contexts or min(contexts) < 1 or steps < 1 or batch < 1:
        raise ConfigError(
            f"a workload needs contexts >= 1 token, steps >= 1 and batch >= 1; got"
            f" {len(contexts)} contexts, shortest {min(contexts, default=0)}, {steps} steps,"
            f" batch {batch}"
        )
    return [int(context) for context in contexts]


def prototype(
    *, requests: int = 8, steps: int = 128, context_tokens: int = 8192, layers: int = 32
) -> Workload:
    """Return the public prototype's exploratory workload: 5 blocks of one head per layer and step.

    8 requests one after another, 128 steps each, decode from token 0 of a context of 8,192 tokens,
    a new block every second step, 180 ns of compute per read. 162,304 reads of 8,192 bytes are the
    1,329,594,368 bytes that its published baseline reads.
    """
    count = max(-(-context_tokens // TOKENS_PER_BLOCK), (steps + 1) // 2)
    contexts = _checked([context_tokens] * requests, steps, 1)
    return Workload(
        "prototype", layers, 8192.0, 1, _batches(requests, [steps] * requests, 1), contexts,
        [count] * requests, False, compute_s_per_access=180e-9, from_start=True,
    )  # fmt: skip


def sparse(
    contexts: Sequence[int], *, steps: int = 128, layers: int = 32, batch: int = 1
) -> Workload:
    """Return the prototype's reads at the end of real contexts (tokens): its pattern, its rates."""
    lengths = _checked(contexts, steps, batch)
    counts = [(context + steps - 1) // TOKENS_PER_BLOCK + 1 for context in lengths]
    return Workload(
        "sparse", layers, 8192.0, 1, _batches(len(lengths), [steps] * len(lengths), batch), lengths,
        counts, False, compute_s_per_access=180e-9,
    )  # fmt: skip


def attention(
    contexts: Sequence[int], compute: ComputeModel, *, steps: int = 16, batch: int = 8
) -> Workload:
    """Return real attention: a step reads all blocks of all layers and heads, and the weights."""
    lengths = _checked(contexts, steps, batch)
    model = compute.model
    counts = [(context + steps - 1) // TOKENS_PER_BLOCK + 1 for context in lengths]
    return Workload(
        "attention", model.layers, model.kv_bytes_per_token() * TOKENS_PER_BLOCK,
        model.layers * model.kv_heads, _batches(len(lengths), [steps] * len(lengths), batch),
        lengths, counts, True, compute=compute,
    )  # fmt: skip
