"""Which copies a batch becomes: few large ones by the copy engines, many small ones by a kernel.

`CudaRegion` (a region with its device and its `Shape`s) - `choose` (-> Choice: "calls", "batch" or
"kernel") - `calls` (the 1-D and 2-D copies of a batch), `entries` (its segments, for one batched
call).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexkv._core import ffi
from flexkv.backends.device import Job
from flexkv.backends.packing import PackedRegion
from flexkv.protocols import Region

if TYPE_CHECKING:
    from flexkv._core import CData

PLANE = np.dtype(
    [
        ("base", "<u8"),
        ("block_stride", "<i8"),
        ("stride", "<i8", 3),
        ("count", "<u4", 3),
        ("segment_bytes", "<u4"),
        ("offset", "<u8"),
    ]
)
DIRECT_CALLS = (
    16  # calls of some 3 us each: what a batch may cost the loop before others are better
)
ENTRIES = 2048  # segments of one batched call; of more, even large ones are the kernel's
NOW_ENTRIES = 256  # that the loop may list and queue itself
_MAX_PITCH = (1 << 31) - 1
_SHAPES_KEPT = 256

Array = NDArray[np.uint64]
Kind = Literal["calls", "batch", "kernel"]


class Call(NamedTuple):
    """`rows` rows of `width` bytes on both sides; the pitches are in bytes."""

    device: int
    host: int
    width: int
    rows: int
    device_pitch: int
    host_pitch: int


class Choice(NamedTuple):
    """How to copy a batch; `now`: few enough calls for the loop's thread; `edges`: what `_edges`
    said, where it was asked.
    """

    kind: Kind
    now: bool
    edges: NDArray[np.int64] | None = None


class Shape:
    """The planes of a range of layers, as arrays: what is asked about them for every batch."""

    def __init__(self, planes: CData, count: int) -> None:
        self.planes = np.frombuffer(ffi.buffer(planes, count * PLANE.itemsize), PLANE).copy()
        counts = self.planes["count"].astype(np.int64)
        self._each = counts.prod(axis=1)  # segments of a block, and rows of segments
        self._rows = counts[:, :2].prod(axis=1)
        self.segments = int(self._each.sum())
        self.smallest = int(self.planes["segment_bytes"].min())
        self._steps: tuple[Array, Array, Array, NDArray[np.int64]] | None = None

    def by_run(self, runs: int, blocks: int) -> NDArray[np.bool_]:
        """Of every plane: whether copying each segment of a run of blocks at once takes fewer calls
        than copying the segments of each block at once.
        """
        found: NDArray[np.bool_] = self._each * runs <= self._rows * blocks
        return found

    def calls(self, runs: int, blocks: int) -> int:
        """How many 1-D and 2-D copies a batch takes."""
        return int(np.minimum(self._each * runs, self._rows * blocks).sum())

    def steps(self) -> tuple[Array, Array, Array, NDArray[np.int64]]:
        """Of every segment of a block: device address (block 0), offset in the host block, size,
        stride from block to block.
        """
        if self._steps is None:
            rows = []
            for plane in self.planes:
                size = int(plane["segment_bytes"])
                places = itertools.product(*(range(int(count)) for count in plane["count"]))
                strides = [int(step) for step in plane["stride"]]
                for number, index in enumerate(places):
                    shift = sum(i * step for i, step in zip(index, strides, strict=True))
                    offset = int(plane["offset"]) + number * size
                    rows.append((int(plane["base"]) + shift, offset, size, plane["block_stride"]))
            columns = [np.array(column) for column in zip(*rows, strict=True)]
            self._steps = (
                *(columns[0].astype(np.uint64), columns[1].astype(np.uint64)),
                *(columns[2].astype(np.uint64), columns[3].astype(np.int64)),
            )
        return self._steps


class CudaRegion(PackedRegion):
    """A region of the memory of one device."""

    def __init__(self, region: Region, device: int) -> None:
        super().__init__(region)
        self.device = device
        self._shapes: dict[tuple[int, int] | None, Shape] = {}

    def shape(self, job: Job) -> Shape:
        """What the job's planes are like; remembered for each range of layers."""
        found = self._shapes.get(job.layers)
        if found is None:
            if len(self._shapes) >= _SHAPES_KEPT:
                self._shapes.clear()
            found = self._shapes[job.layers] = Shape(job.planes, job.n_planes)
        return found


def choose(
    job: Job, shape: Shape, *, kernel: bool, batches: bool, below_bytes: int, chunk_slots: int
) -> Choice:
    """Say how to copy a batch.

    Args:
        kernel: there is one that can reach the arena.
        batches: cudaMemcpyBatchAsync is there.
        below_bytes: segments smaller than this are the kernel's.
        chunk_slots: slots between the edges of pinned chunks; 0: the arena is not pinned, and every
            copy of it may block its caller.
    """
    blocks = len(job.device_blocks)
    if not chunk_slots:
        return Choice("calls", False)
    small = shape.smallest < below_bytes
    if not small or not kernel:
        edges = _edges(job)
        if shape.calls(len(edges) + 1, blocks) <= DIRECT_CALLS:
            return Choice("calls", True, edges)
        if batches and shape.segments * blocks <= ENTRIES:
            return Choice("batch", shape.segments * blocks <= NOW_ENTRIES)
    if kernel:
        return Choice("kernel", True)
    return Choice("batch" if batches else "calls", False)


def _edges(job: Job) -> NDArray[np.int64]:
    """Where in the batch slots and blocks do not both count up by one."""
    slots, blocks = job.host_slots, job.device_blocks
    apart = (slots[1:] - slots[:-1] != 1) | (blocks[1:] - blocks[:-1] != 1)  # modulo 2**32
    edges: NDArray[np.int64] = apart.nonzero()[0]
    return edges


def _runs(job: Job, chunk_slots: int, found: NDArray[np.int64] | None) -> Iterator[tuple[int, int]]:
    """Half-open ranges of the batch where slots and blocks count up together, within a chunk."""
    edges = ((_edges(job) if found is None else found) + 1).tolist()
    for first, end in zip([0, *edges], [*edges, len(job.host_slots)], strict=True):
        at, slot = first, int(job.host_slots[first])
        while chunk_slots and slot % chunk_slots + end - at > chunk_slots:
            step = chunk_slots - slot % chunk_slots
            yield at, at + step
            at, slot = at + step, slot + step
        yield at, end


def calls(
    job: Job, shape: Shape, chunk_slots: int, edges: NDArray[np.int64] | None = None
) -> Iterator[Call]:
    """The copies of a batch, as few as 2-D copies can; `edges` are those of its Choice."""
    runs = list(_runs(job, chunk_slots, edges))
    slots, blocks, pitch = job.host_slots, job.device_blocks, job.host_stride_bytes
    by_run = shape.by_run(len(runs), len(blocks))
    for plane, whole_runs in zip(shape.planes, by_run.tolist(), strict=True):
        base, step = int(plane["base"]), int(plane["block_stride"])
        width, counts = int(plane["segment_bytes"]), [int(count) for count in plane["count"]]
        strides, host = [int(stride) for stride in plane["stride"]], job.host_base
        host += int(plane["offset"])
        if not whole_runs:
            for slot, block in zip(slots.tolist(), blocks.tolist(), strict=True):
                at = host + slot * pitch
                for x, y in itertools.product(range(counts[0]), range(counts[1])):
                    device = base + block * step + x * strides[0] + y * strides[1]
                    yield from _rows(device, at, width, counts[2], strides[2], width)
                    at += counts[2] * width
            continue
        for index in itertools.product(*map(range, counts)):
            device = base + sum(i * stride for i, stride in zip(index, strides, strict=True))
            for first, end in runs:
                place = device + int(blocks[first]) * step, host + int(slots[first]) * pitch
                yield from _rows(*place, width, end - first, step, pitch)
            host += width


def _rows(
    device: int, host: int, width: int, rows: int, device_pitch: int, host_pitch: int
) -> Iterator[Call]:
    """One 2-D copy where the pitches allow it, else row by row."""
    if rows == 1 or (width == device_pitch == host_pitch):
        yield Call(device, host, width * rows, 1, 0, 0)
    elif width <= device_pitch <= _MAX_PITCH and width <= host_pitch <= _MAX_PITCH:
        yield Call(device, host, width, rows, device_pitch, host_pitch)
    else:
        for row in range(rows):
            yield Call(device + row * device_pitch, host + row * host_pitch, width, 1, 0, 0)


def entries(job: Job, shape: Shape) -> Iterator[tuple[Array, Array, Array]]:
    """The segments of a batch as (device addresses, host addresses, sizes), ENTRIES at a time."""
    device, offset, size, stride = shape.steps()
    step = max(1, ENTRIES // shape.segments)
    for first in range(0, len(job.device_blocks), step):
        blocks = job.device_blocks[first : first + step].astype(np.int64)
        slots = job.host_slots[first : first + step].astype(np.uint64)
        on_device = device + (blocks[:, None] * stride).view(np.uint64)
        on_host = slots[:, None] * np.uint64(job.host_stride_bytes) + (
            offset + np.uint64(job.host_base)
        )
        sizes = np.broadcast_to(size, on_device.shape)
        yield on_device.ravel(), on_host.ravel(), sizes.ravel()
