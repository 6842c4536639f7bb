"""From tokens, identity and namespace to chained 128-bit keys.

`as_tokens` (anything a caller may pass -> a checked array) - `Keyring.root` (where a namespace
begins) - `Keyring.chain` (one key per whole block, each naming its entire prefix) -
`Keyring.of_group` (the keys of the same blocks in one group of layers).

What a key rests on: the root is BLAKE2b over identity and labels, keyed by the deployment's secret;
blocks are XXH3-128 under the same secret, chained by a keyed permutation (`_core/hash.h` says how
far that can be trusted). `key_hash="sha256"` replaces both by SHA-256 in CPython, at about 1.5 us a
block (3 ms for 32 k tokens of 16). Keys never depend on Python's `hash()`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv._core import ffi, held, lib
from flexkv.errors import ConfigError, InputError
from flexkv.model import Identity, KeyArray

MAX_CACHED_ROOTS = 4096
_TOKEN_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


def as_tokens(tokens: Any, *, name: str = "tokens") -> NDArray[Any]:
    """Return token ids (or slots: `name`) as a contiguous 1-D int32 or int64 array.

    No copy where they are one already.

    Takes a list, tuple, array, numpy array or torch tensor (any device) of integers.

    Raises:
        InputError: not one-dimensional, not integers, an id is negative or does not fit in 63 bits.
    """
    if hasattr(tokens, "detach"):  # a torch tensor, without importing torch
        tokens = tokens.detach().cpu().numpy()
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name} must be a flat sequence of integers: {error}") from error
    if array.ndim != 1:
        raise InputError(f"{name} must be one-dimensional, got shape {array.shape}")
    if array.dtype not in _TOKEN_DTYPES:
        if array.size and array.dtype.kind not in "iu":
            raise InputError(f"{name} must be integers, got dtype {array.dtype}")
        if array.dtype == np.uint64 and array.size and int(array.max()) >> 63:
            raise InputError(f"{name}: {int(array.max())} does not fit in 63 bits")
        array = array.astype(np.int64)
    array = np.ascontiguousarray(array)
    if held.tokens_negative(ffi.from_buffer("uint8_t[]", array), array.itemsize, array.size):
        position = int(np.flatnonzero(array < 0)[0])
        raise InputError(f"{name} must be >= 0, got {int(array[position])} at position {position}")
    return array


class Keyring:
    """Makes the keys of one identity under one deployment secret."""

    def __init__(self, identity: Identity, secret: bytes = b"") -> None:
        if identity.key_hash not in ("xxh3", "sha256"):
            raise ConfigError(f'key_hash must be "xxh3" or "sha256", got {identity.key_hash!r}')
        self.identity = identity
        self.tokens_per_block = identity.spec.tokens_per_block
        self._digest = identity.digest()
        self._key = hashlib.blake2b(secret, digest_size=32, person=b"flexkv secret").digest()
        self._roots: dict[tuple[str, ...], KeyArray] = {}
        self._chain_secret = _expand(self._key, lib.fx_hash_secret_bytes())

    def root(self, namespace: Sequence[str] | None) -> NDArray[np.uint64]:
        """Return the key, shape [2], that stands before the first block of a prompt in `namespace`.

        Labels are ordered and length-prefixed: ("a:b", "c"), ("a", "b:c") and ("a", "b", "c")
        differ, and so do ("",) and (). None is the same as ().

        Raises:
            InputError: the namespace is a bare string or a label is not a string.
        """
        if isinstance(namespace, (str, bytes)):
            raise InputError(
                f"namespace must be a sequence of labels, got {namespace!r}; try ({namespace!r},)"
            )
        labels = () if namespace is None else tuple(namespace)
        cached = self._roots.get(labels)
        if cached is not None:
            return cached
        message = bytearray(self._digest)
        for label in labels:
            if not isinstance(label, str):
                raise InputError(f"namespace labels must be strings, got {label!r}")
            encoded = label.encode("utf-8", "surrogatepass")
            message += len(encoded).to_bytes(8, "little") + encoded
        digest = hashlib.blake2b(
            message, digest_size=16, key=self._key, person=b"flexkv root"
        ).digest()
        root = np.frombuffer(digest, "<u8")
        while len(self._roots) >= MAX_CACHED_ROOTS:
            del self._roots[next(iter(self._roots))]
        self._roots[labels] = root
        return root

    def chain(self, tokens: NDArray[Any], root: NDArray[np.uint64]) -> KeyArray:
        """Return one key per whole block, shape [len(tokens) // tokens_per_block, 2].

        A partial block at the end has none. `tokens` comes from `as_tokens`; equal ids give equal
        keys whatever their width.
        """
        if tokens.dtype not in _TOKEN_DTYPES or not tokens.flags.c_contiguous:
            tokens = as_tokens(tokens)
        blocks = len(tokens) // self.tokens_per_block
        if self.identity.key_hash == "sha256":
            return self._chain_sha256(tokens, root, blocks)
        keys = np.empty((blocks, 2), np.uint64)
        held.hash_chain(
            ffi.from_buffer("uint8_t[]", tokens),
            tokens.itemsize,
            self.tokens_per_block,
            blocks,
            ffi.from_buffer("uint8_t[]", self._chain_secret),
            ffi.from_buffer("uint64_t[]", root),
            ffi.from_buffer("uint64_t[]", keys),
        )
        return keys

    def of_group(self, keys: KeyArray, label: str, *, alone: bool) -> KeyArray:
        """Return the keys that the blocks of `keys` have in a group of layers.

        They differ from those of every other group, and of blocks that are not `alone` there; the
        chained blocks of the group without a name have `keys` themselves.
        """
        if not label and not alone:
            return keys
        message = bytes([alone]) + label.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(
            message, digest_size=16, key=self._key, person=b"flexkv group"
        ).digest()
        marked: KeyArray = keys ^ np.frombuffer(digest, "<u8")
        return marked

    def _chain_sha256(
        self, tokens: NDArray[Any], root: NDArray[np.uint64], blocks: int
    ) -> KeyArray:
        """SHA-256(secret, previous key, token ids as 8 bytes each), cut to 128 bits."""
        data = tokens[: blocks * self.tokens_per_block].astype("<i8").tobytes()
        size = self.tokens_per_block * 8
        previous, keys = root.tobytes(), bytearray()
        for start in range(0, len(data), size):
            previous = hashlib.sha256(self._key + previous + data[start : start + size]).digest()[
                :16
            ]
            keys += previous
        return np.frombuffer(keys, "<u8").reshape(blocks, 2)


def _expand(key: bytes, size_bytes: int) -> bytes:
    """Stretch a key to the secret the C hash wants; its last two words (multipliers) are odd."""
    parts = range(-(-size_bytes // 64))
    stretched = bytearray()
    for part in parts:
        stretched += hashlib.blake2b(bytes([part]), key=key, person=b"flexkv chain").digest()
    words = np.frombuffer(stretched[:size_bytes], "<u8").copy()
    words[-2:] |= np.uint64(1)
    return words.tobytes()
