"""What the vLLM connector reads from an engine's configuration; vLLM itself is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flexkv.errors import ConfigError, LayoutError
from flexkv.integration.vllm.geometry import declared_axes, describe
from flexkv.integration.vllm.options import Options
from flexkv.integration.vllm.requests import namespace_of


class FullAttentionSpec(SimpleNamespace):
    """Known by its name."""


class MambaSpec(SimpleNamespace):
    """Known by its name."""


def engine(**parallel: int) -> Any:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1} | parallel
    return SimpleNamespace(parallel_config=SimpleNamespace(**sizes))


def caches(*specs: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"]) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=100)


def attention(**more: Any) -> FullAttentionSpec:
    usual = {"num_kv_heads": 4, "head_size": 64, "dtype": "torch.bfloat16", "block_size": 32}
    return FullAttentionSpec(**(usual | more))


def test_one_block_holds_the_shares_of_all_ranks() -> None:
    geometry = describe(engine(), caches(attention()), "0.32.0")
    assert geometry.whole.block_bytes == 2 * geometry.share.block_bytes
    assert geometry.share.block_bytes == 2 * 2 * 32 * 4 * 64 * 2
    assert (geometry.whole.axes, geometry.ranks, geometry.blocks) == ("HNPD", 2, 100)


@pytest.mark.parametrize(
    ("config", "kv", "reason"),
    [
        (engine(), caches(attention(), attention()), "2 KV cache groups"),
        (engine(), caches(MambaSpec(block_size=32)), "MambaSpec"),
        (engine(), caches(attention(page_size_padded=4096)), "padded"),
        (engine(), caches(attention(head_size_v=128)), "K and V differ"),
        (engine(), caches(attention(kv_quant_mode=2)), "quantization scales"),
        (engine(pipeline_parallel_size=2), caches(attention()), "pipeline"),
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
