"""`flexkv bench overlap`: results of the agreed names and shape; without the device it says so."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from flexkv import plugins
from flexkv.bench.cache import DeviceMemory, OpenCache, prompts
from flexkv.bench.overhead import SMALL
from flexkv.bench.overlap import run
from flexkv.bench.report import report
from flexkv.cli.bench import app
from flexkv.errors import ConfigError, PluginError
from flexkv.protocols import BlockCopy

needs_device = pytest.mark.skipif(
    find_spec("flexkv_simulated") is None, reason="flexkv-simulated is not installed"
)
CHUNK = 4 * SMALL.block_bytes


@needs_device
def test_every_figure_is_there_in_the_agreed_shape(tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    results = run(
        lambda *step: steps.append(step),
        directory=tmp_path,
        tokens=1024,
        repeats=2,
        requests=5,
        chunk_bytes=CHUNK,
        spec=SMALL,
    )
    rows = {row["name"]: row for row in report("overlap", results)["results"]}
    assert list(rows) == ["hidden_share", "exposed_layers", "completion_spread"]
    assert all(row["samples"] == 2 for row in rows.values())
    assert {name: row["params"]["goal"] for name, row in rows.items()} == {
        "hidden_share": 0.9,
        "exposed_layers": 1.3,
        "completion_spread": 1.5,
    }
    hidden, layers, spread = (row["params"] for row in rows.values())
    assert rows["hidden_share"]["limit"] == 1 - 1 / 16  # 64 blocks, 4 per chunk
    assert min(hidden[f"{leg}_ms"] for leg in ("disk", "device", "together")) > 0
    assert hidden["together_ms"] >= 64 * SMALL.block_bytes / hidden["device_bytes_per_s"] * 1e3
    assert layers["layers"] == SMALL.layers
    assert layers["layer_ms"] >= layers["modelled_layer_ms"] > 0
    assert rows["exposed_layers"]["value"] > 0
    assert rows["completion_spread"]["value"] >= 1
    assert spread["requests"] == 5
    assert spread["chunks_per_request"] == 8
    assert 0 < spread["first_ms"] <= spread["last_ms"]
    assert steps[-1][1:] == (steps[-1][2], steps[-1][2])
    assert not list(tmp_path.iterdir())


def test_without_the_device_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(group: str, name: str) -> Any:
        raise PluginError(f"no {group} plug-in is called {name!r}")

    monkeypatch.setattr(plugins, "load", nothing)
    with pytest.raises(ConfigError, match=r"pip install \./plugins/flexkv-simulated"):
        run(lambda *_: None, tokens=128, spec=SMALL)
    answer = CliRunner().invoke(app, ["overlap", "--json"])
    assert answer.exit_code == 1
    assert "plugins/flexkv-simulated" in answer.output
    assert "Traceback" not in answer.output


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"tokens": 100}, {"requests": 0}])
def test_settings_that_cannot_be_measured_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="whole blocks of 16"):
        run(lambda *_: None, spec=SMALL, **wrong)


def test_a_load_in_layers_tells_the_device_whose_it_is_and_ends_whole() -> None:
    device, blocks = DeviceMemory(SMALL, 32), np.arange(32)
    (text,) = prompts(1, 32 * 16)
    told: list[BlockCopy] = []
    backend = plugins.load(plugins.BACKENDS, "cpu")

    async def copy(self: Any, batch: BlockCopy) -> None:
        await backend.copy(self, batch)
        if batch.tag is not None:
            batch.tag(batch)

    telling = type("Telling", (backend,), {"copy": copy})
    memory = {"host_cache_bytes": 32 * SMALL.stride_bytes, "chunk_bytes": CHUNK}
    with (
        plugins.register(plugins.BACKENDS, "telling", telling),
        OpenCache.open(SMALL, device, **memory, **{"device": "telling"}) as cache,
    ):
        device.fill()
        cache.put([text], blocks=blocks)
        device.wipe()
        assert cache.launch(text, blocks[::-1], told.append)().loaded == len(text)
        device.check(blocks, blocks[::-1])
        assert cache.one(text, blocks).by_tier == {"host": 32}
        assert max(cache.at_once([text, text], [blocks, blocks])) > 0
    moved = {layer: sum(len(b) for b in told if b.layers == (layer, layer + 1)) for layer in (0, 1)}
    assert moved == {0: 32, 1: 32}
