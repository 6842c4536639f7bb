"""`flexkv bench directory`: real nodes, and the model that is checked against them."""

from __future__ import annotations

import pytest

from flexkv.bench.directory import run
from flexkv.bench.directory_model import KEY_BYTES, SNAPSHOT_SHARE, cost
from flexkv.testing.remote import RedisServer


def quiet(step: str, done: int, total: int) -> None:
    """Show no progress."""


def test_two_nodes_come_to_know_each_other_and_news_are_counted(redis_server: RedisServer) -> None:
    results = run(
        quiet,
        nodes=2,
        blocks=1000,
        times=(1,),
        changes_per_s=500,
        seconds=1.0,
        url=redis_server.url,
    )
    found = {item.name: item.value for item in results if not item.name.startswith("model")}
    assert found["changes, per node"] >= 450
    assert found["to the server, per changed block"] >= KEY_BYTES * 0.9
    assert found["rebuild of 2000 blocks"] >= 0
    assert 0 < found["freshness p50"] <= found["freshness p99"]


def test_the_model_grows_with_changes_and_nodes_and_not_with_what_is_held() -> None:
    rates = {"messages_per_s": 10.0, "reads_per_s": 20.0}
    few, many = cost(8, 10**5, 1000, **rates), cost(8, 10**7, 1000, **rates)
    assert (few.sent_bytes, few.received_bytes, few.commands, few.cores) == (
        many.sent_bytes,
        many.received_bytes,
        many.commands,
        many.cores,
    )
    assert many.memory_bytes == 100 * few.memory_bytes
    twice = cost(8, 10**5, 2000, **rates)
    assert twice.sent_bytes - few.sent_bytes == pytest.approx(
        1000 * KEY_BYTES * (1 + 1 / SNAPSHOT_SHARE)
    )
    larger = cost(16, 10**5, 1000, **rates)
    assert larger.server_bytes == pytest.approx(4 * few.server_bytes)
