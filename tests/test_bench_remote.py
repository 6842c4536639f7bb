"""`flexkv bench remote` measures what it says, on a server of its own or in a folder."""

from __future__ import annotations

import math
import shutil

import pytest

from flexkv.backends.remote.mooncake_process import installed
from flexkv.bench import remote
from flexkv.errors import ConfigError


def ignore(step: str, done: int, total: int) -> None:
    pass


@pytest.mark.skipif(not shutil.which("redis-server"), reason="install redis-server")
def test_redis_is_measured_next_to_its_protocol_and_redis_py() -> None:
    read, write = remote.run(ignore, sizes_mib=(4,), repeats=1)
    assert (read.name, write.name) == ("redis_read", "redis_write")
    assert read.limit is not None
    assert read.ratio == pytest.approx(read.value / read.limit)
    assert read.peer is not None
    assert all(math.isfinite(figure) and figure > 0 for figure in (read.value, write.value))


def test_objects_are_measured_next_to_obstore() -> None:
    read, _ = remote.run(ignore, store="objects", sizes_mib=(4,), repeats=1)
    assert read.limit is not None
    assert read.peer is None
    assert read.params["peer"] == "obstore"


@pytest.mark.skipif(not installed(), reason="install flexkv[mooncake]")
def test_mooncake_is_measured_next_to_its_own_client() -> None:
    read, write = remote.run(ignore, store="mooncake", sizes_mib=(4,), repeats=1)
    assert read.limit is not None
    assert read.ratio == pytest.approx(read.value / read.limit)
    assert write.value > 0


def test_an_unknown_store_is_refused() -> None:
    with pytest.raises(ConfigError, match="cassette"):
        remote.run(ignore, store="cassette")
