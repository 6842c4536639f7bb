"""KV memory and sequences of the fake engine: `Chain` (a request's tokens, and a number that stands
for each prefix) - `Memory` (one rank's KV tensors: `write`, `first_wrong`, `poison`).

The KV bytes of a token are a function of its whole prefix, the layer and the rank, so that bytes of
another request, another place or another time are recognised wherever they turn up.
"""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

LAYERS, HEADS, HEAD_SIZE, VOCABULARY = 2, 2, 4, 50
_FACTOR, _MASK = 6364136223846793005, (1 << 64) - 1


class Chain:
    """A prompt and what greedy decoding makes of it, each prefix with its number."""

    def __init__(self, prompt: list[int], tenant: str) -> None:
        self.tokens = list(prompt)
        self._states = [zlib.crc32(tenant.encode()) * _FACTOR & _MASK]

    def states(self, count: int) -> NDArray[np.uint64]:
        """Numbers of the prefixes of 1 to `count` tokens."""
        self._extend(count)
        return np.array(self._states[1 : count + 1], np.uint64)

    def state(self, count: int) -> int:
        """The number of the prefix of `count` tokens."""
        self._extend(count)
        return self._states[count]

    def token(self, place: int) -> int:
        """The token at a place: of the prompt, or what is decoded there."""
        self._extend(place + 1)
        return self.tokens[place]

    def _extend(self, count: int) -> None:
        while len(self._states) <= count:
            state = self._states[-1]
            if len(self.tokens) < len(self._states):
                self.tokens.append((state >> 33) % VOCABULARY)
            mixed = (state ^ (self.tokens[len(self._states) - 1] + 1)) * _FACTOR & _MASK
            self._states.append(mixed ^ (mixed >> 29))


class Tensor(np.ndarray):
    """An array that answers like a torch tensor as far as the connector asks."""

    device: ClassVar[Any] = SimpleNamespace(type="cpu")

    def dim(self) -> int:
        return self.ndim


class Memory:
    """One rank's KV memory in the layout of a version."""

    def __init__(self, rank: int, blocks: int, size: int, minor: int, device: str) -> None:
        self.size = size
        kind = type("TensorOf", (Tensor,), {"device": SimpleNamespace(type=device)})
        dice = np.random.default_rng(rank)
        self._factors = dice.integers(1, 1 << 63, (LAYERS, HEADS * 2 * HEAD_SIZE), np.uint64) | 1
        self.tensors: dict[str, Any] = {}
        self._views: list[NDArray[np.uint32]] = []  # block, token, head, part, element
        for layer in range(LAYERS):
            if minor < 25:
                raw = np.zeros((2, blocks, HEADS, size, HEAD_SIZE), np.uint32)
                self._views.append(raw.transpose(1, 3, 2, 0, 4))
            else:
                raw = np.zeros((blocks, HEADS, size, 2 * HEAD_SIZE), np.uint32)
                shaped = raw.reshape(blocks, HEADS, size, 2, HEAD_SIZE)
                self._views.append(shaped.transpose(0, 2, 1, 3, 4))
            self.tensors[f"model.layers.{layer}.attn"] = raw.view(np.float32).view(kind)

    def _expected(self, layer: int, states: NDArray[np.uint64]) -> NDArray[np.uint32]:
        wide = states[:, None] * self._factors[layer][None, :] >> np.uint64(32)
        return wide.astype(np.uint32).reshape(-1, HEADS, 2, HEAD_SIZE)

    def _places(self, blocks: list[int], first: int, last: int) -> tuple[Any, Any]:
        places = np.arange(first, last)
        return np.asarray(blocks)[places // self.size], places % self.size

    def write(self, layer: int, blocks: list[int], first: int, states: NDArray[np.uint64]) -> None:
        """Compute the tokens from `first` on; `states` are those of the whole sequence so far."""
        at = self._places(blocks, first, len(states))
        self._views[layer][at] = self._expected(layer, states[first:])

    def first_wrong(self, layer: int, blocks: list[int], states: NDArray[np.uint64]) -> int:
        """The first place of a sequence whose bytes are not its own; -1: there is none."""
        held = self._views[layer][self._places(blocks, 0, len(states))]
        wrong = (held != self._expected(layer, states)).reshape(len(states), -1).any(1)
        return int(wrong.argmax()) if wrong.any() else -1

    def poison(self, blocks: list[int]) -> None:
        """Fill blocks that change hands with bytes that are nobody's."""
        if blocks:
            for view in self._views:
                view[np.asarray(blocks)] = 0xDEAD
