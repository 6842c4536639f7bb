"""An engine's KV tensors in device memory, of any layout, and their blocks as the kit sees them.

`KvMemory`: `fill`, `snapshot`, `block`, `place`, `free`. Positions of bytes are computed from
strides alone, apart from `flexkv.backends.layout`, and read through the harness's back door.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv.model import KVSpec, LayerGroup
from flexkv.testing.harness import Bytes, DeviceHarness, TensorLayout


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor: its memory, layout, and bytes from one block, token, ... to the next."""

    memory: Any
    layout: TensorLayout
    steps: dict[str, int]


class KvMemory:
    """KV tensors of `blocks` blocks of random bytes, gaps included; `tensors` is what engines have.

    Args:
        axes: letters of the dimensions, one word or one per layer group with commas.
        plain: contiguous in the order of `axes`; else in any order of memory, with gaps.
        shared: in memory that can be exported.
    """

    def __init__(
        self,
        harness: DeviceHarness,
        spec: KVSpec,
        axes: str,
        blocks: int,
        rng: random.Random,
        *,
        plain: bool = False,
        shared: bool = False,
    ) -> None:
        self.harness, self.spec, self.axes, self.blocks = harness, spec, axes, blocks
        plain = plain or not harness.random_strides
        names = axes.split(",") if "," in axes else [axes] * len(spec.groups)
        self.tensors: dict[str, Any] = {}
        self._parts: list[_Part] = []
        for layer in range(1 if "L" in axes else spec.layers):
            group = spec.group_of(layer)
            layout = plan(names[spec.groups.index(group)], spec, group, blocks, rng, plain=plain)
            memory = harness.allocate(layout.size_bytes, shared=shared)
            self._parts.append(_Part(memory, layout, _steps(layout, spec, group)))
            self.tensors[f"layer.{layer}"] = harness.tensor(memory, layout)
        self.fill(rng)

    def fill(self, rng: random.Random) -> None:
        """Overwrite all memory with random bytes."""
        for part in self._parts:
            data = np.frombuffer(rng.randbytes(part.layout.size_bytes), np.uint8)
            self.harness.write_raw(part.memory, data)

    def snapshot(self) -> list[Bytes]:
        """All bytes of all tensors' memory, read through the back door."""
        return [self.harness.read_back(part.memory) for part in self._parts]

    def block(self, snapshot: list[Bytes], number: int) -> Bytes:
        """A block of a snapshot as it lies in host memory."""
        return np.concatenate(
            [snapshot[part][at] for part, at in map(self._where(number), range(self.spec.layers))]
        )

    def place(self, snapshot: list[Bytes], number: int, data: Bytes) -> None:
        """Put a block into a snapshot: what memory must look like after a copy."""
        start = 0
        for part, at in map(self._where(number), range(self.spec.layers)):
            snapshot[part][at] = data[start : start + len(at)]
            start += len(at)

    def free(self) -> None:
        """Give the memory back; the tensors are gone."""
        self.tensors.clear()
        for part in self._parts:
            self.harness.free(part.memory)
        self._parts.clear()

    def _where(self, block: int) -> Any:
        def positions(layer: int) -> tuple[int, NDArray[np.int64]]:
            number = 0 if "L" in self.axes else layer
            part, group = self._parts[number], self.spec.group_of(layer)
            inside = layer if "L" in self.axes else 0
            start = part.layout.offset_bytes
            start += block * part.steps["B"] + inside * part.steps["L"]
            counts = {"P": group.parts, "N": self.spec.tokens_per_block}
            counts |= {"H": group.heads, "D": group.head_size}
            grid = np.array(start)
            for letter in self.spec.axes:
                grid = grid[..., None] + np.arange(counts[letter]) * part.steps[letter]
            grid = grid[..., None] + np.arange(group.itemsize_bytes)
            return number, grid.reshape(-1)

        return positions


def plan(
    axes: str,
    spec: KVSpec,
    group: LayerGroup,
    blocks: int,
    rng: random.Random,
    *,
    plain: bool = False,
) -> TensorLayout:
    """Choose a layout for one tensor whose dimensions are `axes`.

    In any order of memory, with gaps in every dimension and bytes before the first element;
    `plain`: contiguous in the order of `axes`.
    """
    tokens, parts = spec.tokens_per_block, group.parts
    sizes = {"L": spec.layers, "B": blocks, "P": parts, "N": tokens, "H": group.heads}
    sizes |= {"D": group.head_size, "C": parts * group.head_size, "T": blocks * tokens, "1": 1}
    shape = [sizes[letter] for letter in axes]
    order, gaps, offset = list(range(len(shape))), [0] * len(shape), 0
    if not plain:
        rng.shuffle(order)
        gaps = [rng.choice([0, 0, 1, 3]) for _ in shape]
        offset = rng.choice([0, 0, 16, 112]) * group.itemsize_bytes
    strides, step = [0] * len(shape), group.itemsize_bytes
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis] + gaps[axis]
    return TensorLayout(axes, group.dtype, tuple(shape), tuple(strides), offset, offset + step)


def _steps(layout: TensorLayout, spec: KVSpec, group: LayerGroup) -> dict[str, int]:
    """Bytes between neighbours of each plain letter; fused axes are taken apart."""
    steps = dict.fromkeys("LBPNHD", 0)
    for letter, stride in zip(layout.axes, layout.strides_bytes, strict=True):
        if letter == "T":
            steps |= {"B": spec.tokens_per_block * stride, "N": stride}
        elif letter == "C":
            steps |= {"P": group.head_size * stride, "D": stride}
        elif letter != "1":
            steps[letter] = stride
    return steps
