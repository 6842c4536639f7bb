"""KV tensors of every layout and their blocks, in numpy: `build`, `by_letters`, `block_of`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv.model import KVSpec, LayerGroup

WORDS = {1: np.uint8, 2: np.uint16, 4: np.float32}
PER_LAYER = ["BPNHD", "PBNHD", "BNPHD", "BPHND", "PBHND", "BHNC", "BNHC", "TPHD", "PTHD", "HTC"]
ONE_TENSOR = ["LBPNHD", "BLPNHD", "LPBNHD", "LBHNC", "BLHNC", "LTPHD"]


def sizes(axes: str, spec: KVSpec, group: LayerGroup, blocks: int) -> dict[str, int]:
    """Size of each letter of `axes`."""
    tokens = spec.tokens_per_block
    parts = 1 if "P" not in axes and "C" not in axes else group.parts
    full = {"L": spec.layers, "B": blocks, "P": parts, "N": tokens, "H": group.heads}
    full |= {"D": group.head_size, "C": parts * group.head_size, "T": blocks * tokens, "1": 1}
    return {letter: full[letter] for letter in axes}


def build(
    axes: str,
    spec: KVSpec,
    group: LayerGroup,
    blocks: int,
    rng: random.Random,
    *,
    plain: bool = False,
) -> NDArray[Any]:
    """A tensor of random bytes whose dimensions are `axes`, in any memory order, with gaps.

    `plain`: contiguous in the order of `axes`.
    """
    shape = list(sizes(axes, spec, group, blocks).values())
    order = list(range(len(shape)))
    gaps = [0] * len(shape)
    if not plain:
        rng.shuffle(order)
        gaps = [rng.choice([0, 0, 1, 3]) for _ in shape]
    stored = [shape[axis] + gaps[axis] for axis in order]
    word = WORDS[group.itemsize_bytes]
    raw = np.frombuffer(rng.randbytes(int(np.prod(stored)) * group.itemsize_bytes), word).copy()
    cut = raw.reshape(stored)[tuple(slice(shape[axis]) for axis in order)]
    return cut.transpose(np.argsort(order))


def by_letters(tensor: NDArray[Any], axes: str, tokens: int, parts: int) -> NDArray[Any]:
    """A view of the tensor with axes L, B, P, N, H, D; missing ones have size 1."""
    names = list(axes)
    for fused, pair in (("T", ["B", "N"]), ("C", ["P", "D"])):
        if fused in names:
            at = names.index(fused)
            count = tensor.shape[at]
            split = (count // tokens, tokens) if fused == "T" else (parts, count // parts)
            tensor = tensor.reshape(*tensor.shape[:at], *split, *tensor.shape[at + 1 :])
            names[at : at + 1] = pair
    for letter in "LBPNHD":
        if letter not in names:
            tensor, names = tensor[..., None], [*names, letter]
    kept = [names.index(letter) for letter in "LBPNHD"]
    ignored = [at for at, letter in enumerate(names) if letter == "1"]
    view = tensor.transpose(kept + ignored)
    return view.reshape(view.shape[:6])


def block_of(views: list[NDArray[Any]], block: int, order: str) -> NDArray[np.uint8]:
    """The host bytes of a block: layers in turn, each with its axes in `order`.

    `views`: what `by_letters` gives, one per layer, of size 1 in L.
    """
    taken = [
        np.ascontiguousarray(view[0, block].transpose(["PNHD".index(letter) for letter in order]))
        for view in views
    ]
    return np.concatenate([part.reshape(-1).view(np.uint8) for part in taken])
