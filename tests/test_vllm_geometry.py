"""What the vLLM connector reads from an engine's configuration; vLLM itself is not needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexkv.errors import ConfigError, LayoutError
from flexkv.integration.vllm.geometry import declared_axes, describe
from flexkv.integration.vllm.options import Options
from flexkv.integration.vllm.requests import namespace_of
from flexkv.model import CacheGroup


class FullAttentionSpec(SimpleNamespace):
    """Known by its name."""


class MambaSpec(SimpleNamespace):
    """Known by its name."""


class SlidingWindowSpec(SimpleNamespace):
    """Known by its name."""


class Model:
    """A model whose layers are spread over pipeline stages."""

    def __init__(self, *stages: int) -> None:
        self.stages = stages

    def get_layers_start_end_indices(self, worker: Any) -> tuple[int, int]:
        stage = worker.rank // worker.tensor_parallel_size
        assert worker.pipeline_parallel_size == len(self.stages)
        return sum(self.stages[:stage]), sum(self.stages[: stage + 1])


def engine(*stages: int, **parallel: int) -> Any:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": max(1, len(stages))} | parallel
    return SimpleNamespace(parallel_config=SimpleNamespace(**sizes), model_config=Model(*stages))


def caches(*specs: Any, layers: tuple[int, ...] = (2,)) -> Any:
    groups = [
        SimpleNamespace(
            kv_cache_spec=spec,
            layer_names=[f"{number}.{i}" for i in range(layers[number % len(layers)])],
        )
        for number, spec in enumerate(specs)
    ]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=100)


def window(tokens: int = 100, **more: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(**vars(attention(sliding_window=tokens, **more)))


def attention(**more: Any) -> FullAttentionSpec:
    usual = {"num_kv_heads": 4, "head_size": 64, "dtype": "torch.bfloat16", "block_size": 32}
    return FullAttentionSpec(**(usual | more))


def test_one_block_holds_the_shares_of_all_ranks() -> None:
    geometry = describe(engine(), caches(attention()), "0.32.0")
    assert geometry.whole.block_bytes == 2 * geometry.share(1).block_bytes
    assert geometry.share(0).block_bytes == 2 * 2 * 32 * 4 * 64 * 2
    assert (geometry.whole.axes, geometry.ranks, geometry.blocks) == ("HNPD", 2, 100)
    assert geometry.by_block
    assert geometry.groups[0].cache == CacheGroup()
    assert geometry.ranks_label == "tp2,pp1,dp0"


def test_stages_of_a_pipeline_may_have_different_numbers_of_layers() -> None:
    spread = engine(2, 3, data_parallel_index=1)
    geometry = describe(spread, caches(attention()), "0.32.0")
    assert geometry.whole == describe(spread, caches(attention(), layers=(3,)), "0.32.0").whole
    layer = 2 * 32 * 4 * 64 * 2
    shares = [geometry.share(rank).block_bytes for rank in range(geometry.ranks)]
    assert shares == [2 * layer, 2 * layer, 3 * layer, 3 * layer]
    assert geometry.whole.block_bytes == sum(shares)
    assert geometry.rank(1, 0) == 2
    assert geometry.ranks_label == "tp2,pp2:2+3,dp1"


def test_groups_of_a_hybrid_model_have_names_and_windows() -> None:
    kv = caches(attention(), window(), window(extra_retained_tokens=2), layers=(2, 2, 1))
    geometry = describe(engine(), kv, "0.32.0")
    assert [group.number for group in geometry.groups] == [0, 1, 2]
    assert [group.cache.window_tokens for group in geometry.groups] == [0, 99, 101]
    assert len({group.cache.label for group in geometry.groups}) == 3
    assert geometry.share(0).layers == 2
    assert not geometry.by_block
    assert not describe(engine(), caches(window()), "0.32.0").by_block
    kv.prefix_cacheable_group_ids = (0, 2)  # the other one is not to be kept
    assert [group.number for group in describe(engine(), kv, "0.32.0").groups] == [0, 2]


class Tensor:
    """Where a tensor lies."""

    def __init__(self, address: int, stride: int = 8) -> None:
        self.address, self.strides, self.shape = address, (stride, 1), (100, 8)

    def data_ptr(self) -> int:
        return self.address

    def stride(self, dimension: int) -> int:
        return self.strides[dimension]

    def element_size(self) -> int:
        return 2


def test_groups_that_do_not_share_their_tensors_are_refused() -> None:
    kv = caches(attention(), window(), layers=(2, 1))
    geometry = describe(engine(), kv, "0.32.0")
    shared = {"0.0": Tensor(1), "0.1": Tensor(2), "1.0": Tensor(1)}
    assert list(geometry.tensors(shared)) == ["0.0", "0.1"]
    for other in (Tensor(2), Tensor(1, stride=16)):
        with pytest.raises(LayoutError, match=r"1\.0 does not lie where"):
            geometry.tensors(shared | {"1.0": other})
    with pytest.raises(LayoutError, match=r"no KV tensor for 1\.0"):
        geometry.tensors({name: shared[name] for name in ("0.0", "0.1")})


@pytest.mark.parametrize(
    ("config", "kv", "reason"),
    [
        (engine(), caches(attention(), MambaSpec(block_size=32)), "MambaSpec.*without flexkv"),
        (engine(), caches(attention(), window(block_size=64)), "tokens per block"),
        (engine(), caches(attention(), window(num_kv_heads=2)), "bytes per block"),
        (engine(2, 2), caches(attention(), window()), "2 KV cache groups over 2 pipeline stages"),
        (engine(3, 3), caches(attention()), r"a pipeline stage has 2 layers.*\[3, 3\]"),
        (engine(), caches(attention(page_size_padded=4096)), "padded"),
        (engine(), caches(attention(head_size_v=128)), "K and V differ"),
        (engine(), caches(attention(kv_quant_mode=2)), "quantization scales"),
        (engine(decode_context_parallel_size=2), caches(attention()), "context"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_reason(
    config: Any, kv: Any, reason: str
) -> None:
    with pytest.raises(LayoutError, match=reason):
        describe(config, kv, "0.32.0")


@pytest.mark.parametrize(
    ("version", "dimensions", "on_cpu", "axes"),
    [
        ("0.19.1", 5, True, "PBHND"),
        ("0.25.1", 4, True, "BHNC"),
        ("0.28.0", 4, False, "BHNC"),
        ("0.32.0", 4, True, "BHNC"),
        ("0.33.0+cu130", 4, False, "BHNC"),
    ],
)
def test_layouts_are_declared_by_version(
    version: str, dimensions: int, on_cpu: bool, axes: str
) -> None:
    assert declared_axes(version, dimensions, on_cpu=on_cpu) == axes


@pytest.mark.parametrize(
    ("version", "dimensions", "on_cpu"),
    [("0.32.0", 5, True), ("0.22.1", 5, False), ("0.19.1", 4, True), ("0.32.0", 3, False)],
)
def test_a_layout_that_is_not_declared_is_refused(
    version: str, dimensions: int, on_cpu: bool
) -> None:
    with pytest.raises(LayoutError, match='setting "axes"'):
        declared_axes(version, dimensions, on_cpu=on_cpu)


def request(**given: Any) -> Any:
    usual = {"lora_request": None, "cache_salt": None, "mm_features": []}
    return SimpleNamespace(**(usual | given))


def test_adapter_salt_and_image_of_one_name_are_different_namespaces() -> None:
    image = SimpleNamespace(identifier="x", mm_position=SimpleNamespace(offset=0, length=4))
    spaces = {
        namespace_of(request()),
        namespace_of(request(cache_salt="x")),
        namespace_of(request(lora_request=SimpleNamespace(lora_name="x", lora_path="p"))),
        namespace_of(request(lora_request=SimpleNamespace(lora_name="x", lora_path="q"))),
        namespace_of(request(mm_features=[image])),
        namespace_of(request(cache_salt="x", mm_features=[image])),
        namespace_of(request(namespace_info={"x": 1})),
    }
    assert len(spaces) == 7
    assert namespace_of(request()) == ()


def test_settings_of_the_connector_are_checked_and_the_rest_is_flexkvs() -> None:
    options = Options.read({"load": "sync", "host_cache_bytes": "1GiB"})
    assert (options.load, options.save) == ("sync", "finish")
    assert options.settings == {"host_cache_bytes": "1GiB"}
    with pytest.raises(ConfigError, match="load must be one of"):
        Options.read({"load": "later"})
    with pytest.raises(ConfigError, match="rank_timeout_ms must be int"):
        Options.read({"rank_timeout_ms": "1 s"})


def test_the_device_of_the_workers_is_set_like_any_other_and_is_not_the_managers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert Options.read({}).worker_device("cuda") == ("cuda", {})
    chosen = {"device": "mine", "device_options": {"engines": 2}}
    assert Options.read(chosen).worker_device("cpu") == ("mine", {"engines": 2})
    path = tmp_path / "flexkv.yaml"
    path.write_text("device_options: {engines: 3}")
    monkeypatch.setenv("FLEXKV_DEVICE", "other")
    options = Options.read({"config_path": str(path)})
    assert options.worker_device("cpu") == ("other", {"engines": 3})
    model = SimpleNamespace(model="m", revision=None, dtype="float32", quantization=None)
    geometry, server = describe(engine(), caches(attention()), "0.32.0"), object()
    config = options.manager_config(SimpleNamespace(model_config=model), geometry, server)
    assert (config.device, config.device_options) == ("ranks", {"server": server})
    with pytest.raises(ConfigError, match="engins"):
        Options.read({"engins": 2}).worker_device("cpu")
