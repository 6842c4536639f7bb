"""`flexkv bench e2e`: its results have the agreed names and shape, and it notices wrong bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flexkv.bench.cache import DeviceMemory, OpenCache, prompts
from flexkv.bench.e2e import run
from flexkv.bench.overhead import SMALL
from flexkv.bench.report import report
from flexkv.errors import ConfigError, TransferError

NAMES = ["host_get", "put", "disk_get", "host_hit_one_block"]
FIELDS = {"name", "value", "unit", "limit", "peer", "ratio", "samples", "params"}


def test_every_figure_is_there_in_the_agreed_shape(tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    results = run(
        lambda *step: steps.append(step),
        directory=tmp_path,
        requests="1,4",
        tokens=128,
        repeats=2,
        hits=20,
        spec=SMALL,
    )
    rows = report("e2e", results)["results"]
    assert all(set(row) == FIELDS for row in rows)
    names = [row["name"] for row in rows]
    assert {name: names.count(name) for name in NAMES} == {
        "host_get": 2,
        "put": 2,
        "disk_get": 2,
        "host_hit_one_block": 1,
    }
    assert names.count("host_get_vs_lmcache") == names.count("disk_get_vs_lmcache") == 1
    assert all(row["value"] > 0 for row in rows)
    assert {row["unit"] for row in rows} == {"GB/s", "us"}
    host = [row for row in rows if row["name"] in ("host_get", "put")]
    assert all(row["limit"] > 0 and row["ratio"] > 0 and row["samples"] == 2 for row in host)
    assert [row["params"]["requests"] for row in host] == [1, 1, 4, 4]
    assert steps[-1][1:] == (steps[-1][2], steps[-1][2])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("requests", ["", "0", "3", "1,x"])
def test_requests_that_cannot_share_the_tokens_are_refused(requests: str) -> None:
    with pytest.raises((ConfigError, ValueError)):
        run(lambda *_: None, requests=requests, tokens=128, spec=SMALL)


def test_wrong_bytes_are_noticed() -> None:
    device = DeviceMemory(SMALL, 8)
    blocks, texts = np.arange(8), prompts(1, 128)
    with OpenCache.open(SMALL, device, host_cache_bytes=8 * SMALL.stride_bytes) as cache:
        device.fill()
        cache.put(texts, blocks=blocks)
        cache.get(texts, blocks=blocks[::-1])
        device.check(blocks, blocks[::-1])
        device.caches["layer.1"][1, 3] ^= 1
        with pytest.raises(TransferError, match="block 3 came back with other bytes"):
            device.check(blocks, blocks[::-1])
        with pytest.raises(TransferError, match="were not loaded"):
            cache.get(prompts(1, 128, name=1), blocks=blocks)
