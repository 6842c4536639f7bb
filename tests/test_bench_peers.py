"""`flexkv bench peers` measures what it says: reads from another process, next to plain sockets."""

from __future__ import annotations

import math

import pytest

from flexkv.bench import peers


def test_reads_from_another_process_are_measured_next_to_plain_sockets() -> None:
    read, one = peers.run(lambda step, done, total: None, sizes_kib=(1024,), repeats=1)
    assert (read.name, read.unit) == ("peer_read", "GB/s")
    assert (one.name, one.unit) == ("peer_one_block", "ms")
    for result in (read, one):
        assert result.limit is not None
        assert all(math.isfinite(x) and x > 0 for x in (result.value, result.limit))
        assert result.ratio == pytest.approx(result.value / result.limit)
        assert result.params == {"block_kib": 1024, "connections": 2}
