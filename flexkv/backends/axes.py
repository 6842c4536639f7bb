"""Names of a tensor's dimensions: declared as letters, or found where sizes leave only one reading.

`Tensor` (address, shape, strides) - `split_axes` (a declaration -> one per layer group) -
`infer_axes` (sizes -> letters) - `read_dims` (letters -> counts and strides).

L layer, B block, P part (K, V), N token in block, H head, D element, C = P and D fused (K then V),
T = B and N fused (a pool of single tokens), 1 = a dimension to ignore.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from flexkv.errors import LayoutError

_SPELLED = {"L": "layer", "B": "block", "P": "part", "N": "token", "H": "head", "D": "element"}

# letter of L, B, P, N, H, D -> (count, stride in bytes)
Dims: TypeAlias = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as address arithmetic; strides in bytes."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str


def split_axes(axes: str | None, groups: int) -> list[str | None]:
    """Return one checked declaration per layer group; None where axes are to be inferred.

    Raises:
        LayoutError: letters are unknown, repeated or contradict each other.
    """
    if axes is None:
        return [None] * groups
    named: list[str | None] = [text.strip().upper() for text in axes.split(",")]
    if len(named) == 1:
        named *= groups
    if len(named) != groups:
        raise LayoutError(f"axes {axes!r} names {len(named)} layouts for {groups} layer groups")
    for text in named:
        assert text is not None
        letters = text.replace("1", "")
        wrong = (
            set(letters) - set("LBPNHDCT")
            or len(set(letters)) != len(letters)
            or ("B" in letters) == ("T" in letters)
            or ("T" in letters and "N" in letters)
            or ("C" in letters and ("P" in letters or "D" in letters))
        )
        if wrong:
            raise LayoutError(
                f"axes {text!r}: use each of L B P N H D at most once, with B (or T for B and N "
                "fused), C for P and D fused, 1 for a dimension to ignore"
            )
    return named


def read_dims(tensor: Tensor, axes: str, sizes: dict[str, int]) -> Dims:
    """Pair letters with dimensions and split the fused ones.

    Args:
        sizes: what L, P, N, H, D and C must be; B and T are free.

    Raises:
        LayoutError: a size differs, or a letter of more than one is missing.
    """
    if len(axes) != len(tensor.shape):
        raise LayoutError(
            f"{tensor.name} of shape {tensor.shape} has {len(tensor.shape)} dimensions, axes "
            f"{axes!r} name {len(axes)}"
        )
    dims: Dims = {}
    for letter, count, stride in zip(axes, tensor.shape, tensor.strides, strict=True):
        wanted = 1 if letter == "1" else sizes.get(letter, count)
        if count != wanted:
            raise LayoutError(
                f"{tensor.name} of shape {tensor.shape}: axis {letter} of {axes!r} has size "
                f"{count}, the KVSpec says {wanted}"
            )
        if letter == "T":
            tokens = sizes["N"]
            if count < tokens:
                raise LayoutError(
                    f"{tensor.name}: {count} tokens are less than a block of {tokens}"
                )
            dims["B"] = (count // tokens, tokens * stride)
            dims["N"] = (tokens, stride)
        elif letter == "C":
            dims["P"] = (sizes["P"], sizes["D"] * stride)
            dims["D"] = (sizes["D"], stride)
        elif letter != "1":
            dims[letter] = (count, stride)
    for letter, spelled in _SPELLED.items():
        if letter not in dims and sizes.get(letter, 1) > 1:
            raise LayoutError(
                f"{tensor.name} of shape {tensor.shape}: axes {axes!r} lack {letter} ({spelled}), "
                f"of which there are {sizes[letter]}"
            )
        dims.setdefault(letter, (1, 0))
    return dims


def infer_axes(tensor: Tensor, sizes: dict[str, int]) -> str:
    """Return the only reading of the tensor's dimensions that the sizes allow.

    Raises:
        LayoutError: there is none, or several that differ in their bytes.
    """
    readings: dict[tuple[Any, ...], str] = {}
    for axes in _candidates(tensor.shape, sizes, ""):
        dims = read_dims(tensor, axes, sizes)
        effect = tuple(dims[letter] if dims[letter][0] > 1 else None for letter in _SPELLED)
        readings.setdefault(effect, axes)  # letters of size 1 may trade places: same bytes
    wanted = {letter: sizes[letter] for letter in "LPNHD" if sizes[letter] > 1}
    if not readings:
        raise LayoutError(
            f"{tensor.name} of shape {tensor.shape} does not match the KVSpec (a dimension for "
            f"blocks and {wanted}, P and D possibly fused); check the spec or declare axes"
        )
    if len(readings) > 1:
        several = ", ".join(sorted(readings.values()))
        raise LayoutError(
            f"{tensor.name} of shape {tensor.shape} can be read as {several}; declare axes"
        )
    return next(iter(readings.values()))


def _candidates(shape: tuple[int, ...], sizes: dict[str, int], taken: str) -> Iterator[str]:
    if len(taken) == len(shape):
        have = set(taken) | ({"B", "N"} if "T" in taken else set())
        have |= {"P", "D"} if "C" in taken else set()
        if "B" in have and all(letter in have or sizes[letter] == 1 for letter in "LPNHD"):
            yield taken
        return
    count = shape[len(taken)]
    options = [letter for letter in "LPNHD" if sizes[letter] == count]
    options += ["C"] if sizes["P"] > 1 and sizes["C"] == count else []
    options += ["B", "T"] if sizes["N"] > 1 and count >= sizes["N"] else ["B"]
    options += ["1"] if count == 1 else []
    clashes = {"C": "CPD", "P": "PC", "D": "DC", "T": "TBN", "B": "BT", "N": "NT", "1": ""}
    for letter in options:
        if not set(clashes.get(letter, letter)) & set(taken):
            yield from _candidates(shape, sizes, taken + letter)
