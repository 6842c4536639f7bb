"""No schedule of lease, evict, publish and crash reads a block that is not its key's."""

from __future__ import annotations

import pytest
from lease_model import walk


@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_reads_a_block_that_is_not_its_keys(seed: int) -> None:
    seen = walk(seed, 800)
    for what in ("right", "recycled", "released", "late", "refused", "removed"):
        assert seen[what], f"{what} never happened: {dict(seen)}"


def test_a_seed_replays() -> None:
    assert walk(5, 300) == walk(5, 300)
