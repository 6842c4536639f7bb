"""The files of the disk tier: what is on disk is what was meant, and everything else is noticed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv.backends.disk import format as disk_format
from flexkv.backends.disk.format import (
    DAMAGED,
    EMPTY,
    GOOD,
    RECORD,
    SUPERBLOCK_BYTES,
    Geometry,
    Superblock,
)
from flexkv.errors import FormatError
from flexkv.model import Identity, KVSpec, LayerGroup

IDENTITY = Identity("llama", "main", KVSpec.uniform(32, 8, 128))


def make_superblock(identity: Identity = IDENTITY) -> Superblock:
    return Superblock(
        identity.digest(),
        disk_format.identity_text(identity),
        bytes(range(16)),
        2,
        Geometry(1000, 3, 8192, 5120),
    )


def test_superblock_comes_back_as_it_was() -> None:
    made = make_superblock()
    block = made.encode()
    assert len(block) == SUPERBLOCK_BYTES
    assert Superblock.decode(block) == made
    assert b'"model":"llama"' in block, "people must be able to read whose it is"


def test_any_flipped_byte_of_a_superblock_is_noticed() -> None:
    block = make_superblock().encode()
    for position in range(SUPERBLOCK_BYTES):
        spoilt = bytearray(block)
        spoilt[position] ^= 0x10
        with pytest.raises(FormatError):
            Superblock.decode(bytes(spoilt))


def test_any_cut_superblock_is_noticed() -> None:
    block = make_superblock().encode()
    for size in (1, 7, 8, 12, 100, SUPERBLOCK_BYTES - 1):
        with pytest.raises(FormatError):
            Superblock.decode(block[:size])


def test_other_versions_are_named() -> None:
    older = replace(make_superblock(), format_version=0).encode()
    with pytest.raises(FormatError, match="older format, 0"):
        Superblock.decode(older)
    newer = replace(make_superblock(), format_version=7).encode()
    with pytest.raises(FormatError, match="newer format, 7"):
        Superblock.decode(newer)


def test_an_identity_too_long_to_print_still_has_its_digest() -> None:
    groups = tuple(LayerGroup((layer,), 8, 128) for layer in range(400))
    huge = Identity("m" * 3000, "", KVSpec(groups))
    back = Superblock.decode(make_superblock(huge).encode())
    assert back.digest == huge.digest()
    assert back.identity == ""


def test_differences_name_the_fields() -> None:
    other = replace(IDENTITY, revision="v2", spec=replace(IDENTITY.spec, tokens_per_block=32))
    said = disk_format.differences(
        disk_format.identity_text(IDENTITY), disk_format.identity_text(other)
    )
    assert said == [
        "revision is 'v2' on disk and 'main' here",
        "spec.tokens_per_block is 32 on disk and 16 here",
    ]
    assert disk_format.differences("{}", "not json") == ["the identity differs"]


def test_runs_of_layers_are_short_for_people() -> None:
    text = disk_format.identity_text(IDENTITY)
    assert '"layers":"0-31"' in text
    uneven = Identity("m", "", KVSpec((LayerGroup((0, 2, 3), 1, 8), LayerGroup((1,), 1, 8))))
    assert '"layers":"0,2,3"' in disk_format.identity_text(uneven)


@given(slots=st.integers(1, 300), directories=st.integers(1, 9))
def test_every_slot_has_a_place_of_its_own(slots: int, directories: int) -> None:
    geometry = Geometry(slots, directories, 4096, 4096)
    folder, local = geometry.locate(np.arange(slots, dtype=np.uint32))
    places = set(zip(folder.tolist(), local.tolist(), strict=True))
    assert len(places) == slots
    assert sum(geometry.local_slots(index) for index in range(directories)) == slots
    for index, place in places:
        assert place < geometry.local_slots(index)


def some_records(count: int = 4, seed: int = 9) -> np.ndarray:
    records = np.zeros(count, RECORD)
    random = np.random.default_rng(3)
    records.view(np.uint8)[:] = random.integers(1, 256, count * 64, np.uint8)
    disk_format.seal(records, np.arange(count, dtype=np.uint32), np.full(count, seed, np.uint64))
    return records


def test_sealed_records_are_good_and_zeros_are_empty() -> None:
    records = some_records()
    records[1] = np.zeros(1, RECORD)[0]
    assert disk_format.check(records, 0, 9).tolist() == [GOOD, EMPTY, GOOD, GOOD]


def test_a_record_torn_at_any_byte_is_damaged() -> None:
    whole = some_records(1)
    for size in range(1, 64):
        for rest in (0, 0xFF):
            torn = whole.copy()
            torn.view(np.uint8)[size:] = rest
            if (torn == whole).all():
                continue
            assert disk_format.check(torn, 0, 9).tolist() == [DAMAGED], size


def test_a_record_with_any_bit_flipped_is_damaged() -> None:
    whole = some_records(1)
    for bit in range(64 * 8):
        spoilt = whole.copy()
        spoilt.view(np.uint8)[bit // 8] ^= 1 << (bit % 8)
        assert disk_format.check(spoilt, 0, 9).tolist() == [DAMAGED], bit


def test_a_record_in_another_slot_or_store_is_damaged() -> None:
    records = some_records()
    assert disk_format.check(records[::-1].copy(), 0, 9).tolist() == [DAMAGED] * 4
    assert disk_format.check(records, 1, 9).tolist() == [DAMAGED] * 4
    assert disk_format.check(records, 0, 10).tolist() == [DAMAGED] * 4
