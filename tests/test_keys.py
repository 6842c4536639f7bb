"""Keys: the same prompt has the same keys however it is passed, and nothing else has them."""

from __future__ import annotations

import array
import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv.errors import ConfigError, InputError
from flexkv.keys import MAX_CACHED_ROOTS, Keyring, as_tokens
from flexkv.model import Identity, KVSpec

NAMESPACES = (["a:b", "c"], ["a", "b:c"], ["a:b:c"], ["a", "b", "c"], [""], ["", ""], [], None)


def ring(
    *, tokens_per_block: int = 4, secret: bytes = b"", key_hash: str = "xxh3", model: str = "m"
) -> Keyring:
    spec = KVSpec.uniform(1, 1, 1, tokens_per_block=tokens_per_block)
    return Keyring(Identity(model, spec=spec, key_hash=key_hash), secret)


def keys(tokens: Any, namespace: Any = None, **options: Any) -> list[tuple[int, ...]]:
    keyring = ring(**options)
    chained = keyring.chain(as_tokens(tokens), keyring.root(namespace))
    assert chained.dtype == np.uint64
    assert chained.shape == (len(tokens) // keyring.tokens_per_block, 2)
    return [tuple(row) for row in chained.tolist()]


@pytest.mark.parametrize("key_hash", ["xxh3", "sha256"])
@pytest.mark.parametrize("tokens_per_block", [1, 3, 4, 16, 600])
def test_width_and_container_of_tokens_do_not_matter(key_hash: str, tokens_per_block: int) -> None:
    tokens = [(7 * i * i) % 50_000 for i in range(3 * tokens_per_block)] + [9] * (
        tokens_per_block - 1
    )
    options: dict[str, Any] = {"key_hash": key_hash, "tokens_per_block": tokens_per_block}
    wanted = keys(tokens, **options)
    assert len(set(wanted)) == 3
    for same in (
        tuple(tokens),
        array.array("q", tokens),
        np.array(tokens, np.int32),
        np.array(tokens, np.int64),
        np.array(tokens, np.uint16),
        np.repeat(np.array(tokens, np.int64), 2)[::2],
    ):
        assert keys(same, **options) == wanted


@pytest.mark.torch
def test_torch_tensors_are_tokens() -> None:
    import torch

    tokens = list(range(9))
    for dtype in (torch.int32, torch.int64):
        assert keys(torch.tensor(tokens, dtype=dtype)) == keys(tokens)
    with pytest.raises(InputError, match="integers"):
        as_tokens(torch.zeros(4))


@pytest.mark.parametrize("key_hash", ["xxh3", "sha256"])
@pytest.mark.parametrize("tokens_per_block", [4, 16, 600])
def test_ids_beyond_32_bits_have_keys_of_their_own(key_hash: str, tokens_per_block: int) -> None:
    options: dict[str, Any] = {"key_hash": key_hash, "tokens_per_block": tokens_per_block}
    base = list(range(tokens_per_block))
    high = [0, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1]
    found = [tuple(keys([*base[:-1], base[-1] + extra], **options)) for extra in high[:-1]]
    found.append(tuple(keys([high[-1], *base[1:]], **options)))
    assert len(set(found)) == len(found)


@given(st.lists(st.integers(0, 2**40), min_size=8, max_size=8), st.integers(0, 7))
def test_a_key_names_its_whole_prefix(tokens: list[int], position: int) -> None:
    changed = [*tokens[:position], tokens[position] + 1, *tokens[position + 1 :]]
    before, after = keys(tokens), keys(changed)
    same = position // 4
    assert before[:same] == after[:same]
    assert not set(before[same:]) & set(after[same:])
    assert keys([*tokens, 1, 2, 3]) == before


def test_equal_blocks_at_different_depths_differ() -> None:
    assert len(set(keys([5] * 400))) == 100


@pytest.mark.parametrize("key_hash", ["xxh3", "sha256"])
def test_namespaces_are_isolated(key_hash: str) -> None:
    """D05: only the identical namespace has the keys; () and None are the same by rule."""
    found = [tuple(keys(range(8), namespace, key_hash=key_hash)) for namespace in NAMESPACES]
    for (i, one), (j, other) in itertools.combinations(enumerate(found), 2):
        assert (one == other) == (NAMESPACES[i] == [] and NAMESPACES[j] is None)
    assert keys(range(8), ("a", "b:c"), key_hash=key_hash) == list(found[1])


def test_secret_identity_and_hash_are_part_of_the_key() -> None:
    variants = [
        {},
        {"secret": b"s"},
        {"secret": b"s\0"},
        {"model": "n"},
        {"key_hash": "sha256"},
        {"key_hash": "sha256", "secret": b"s"},
    ]
    found = [tuple(keys(range(8), **options)) for options in variants]
    assert len({key for chain in found for key in chain}) == 2 * len(variants)


def test_keys_spread_over_all_bits() -> None:
    words = np.array(keys(range(40_000)), np.uint64)
    for word in words.T.copy():
        ones = np.unpackbits(word.view(np.uint8)).reshape(len(word), 64).mean(axis=0)
        assert abs(ones - 0.5).max() < 0.03  # 6 sigma of 10,000 fair coins
    assert len(np.unique(words[:, 0])) == len(np.unique(words[:, 1])) == len(words)


def test_keys_are_the_same_in_every_process() -> None:
    program = (
        "from flexkv.keys import *; from flexkv.model import *; import numpy as np;"
        "ring = Keyring(Identity('m', spec=KVSpec.uniform(1, 1, 1, tokens_per_block=4)), b's');"
        "print(ring.chain(as_tokens(range(8)), ring.root(('x', 'y'))).tolist())"
    )
    printed = set()
    for seed in ("0", "1"):
        environment = {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        printed.add(done.stdout.strip())
    assert printed == {str([list(key) for key in keys(range(8), ("x", "y"), secret=b"s")])}


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_prompt_shorter_than_a_block_has_no_keys(length: int) -> None:
    assert keys([1] * length) == []


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([[1, 2], [3, 4]], "one-dimensional"),
        (7, "one-dimensional"),
        ([1.5, 2.0], "integers"),
        (["a"], "integers"),
        ([True, False], "integers"),
        ([1, [2]], "flat sequence"),
        ([1, -2, 3], "-2 at position 1"),
        (np.array([0, -1], np.int32), "-1 at position 1"),
        (np.array([1 << 63], np.uint64), "63 bits"),
        ([1 << 70], "integers"),
        ("abc", "one-dimensional"),
    ],
)
def test_what_is_no_sequence_of_token_ids_is_refused(tokens: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        as_tokens(tokens)


def test_tokens_that_are_an_array_are_not_copied() -> None:
    for dtype in (np.int32, np.int64):
        tokens = np.arange(5, dtype=dtype)
        assert as_tokens(tokens) is tokens
    assert len(as_tokens([])) == 0


@pytest.mark.parametrize("namespace", ["ab", b"ab", [1], ["a", None]])
def test_a_namespace_is_a_sequence_of_strings(namespace: Any) -> None:
    with pytest.raises(InputError, match="namespace"):
        ring().root(namespace)


def test_any_string_is_a_label_and_roots_are_not_hoarded() -> None:
    keyring = ring()
    first = keyring.root(("\ud800",)).tolist()
    roots = {tuple(keyring.root((str(n),)).tolist()) for n in range(MAX_CACHED_ROOTS + 10)}
    assert len(roots) == MAX_CACHED_ROOTS + 10
    assert len(keyring._roots) == MAX_CACHED_ROOTS
    assert keyring.root(("\ud800",)).tolist() == first


def test_an_unknown_hash_is_refused() -> None:
    with pytest.raises(ConfigError, match="md5"):
        ring(key_hash="md5")
