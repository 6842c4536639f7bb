"""What vLLM's KV memory looks like: from its configuration to a KVSpec, from its version to axes.

`describe` (configuration -> Geometry, the same in every process of an engine) - `declared_axes`
(version and dimensions -> letters). Nothing is guessed: what is not declared here is refused with
LayoutError, and sizes are held against the tensors when they are registered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexkv.errors import LayoutError
from flexkv.model import KVSpec

# First version (minor of 0.x), dimensions of a layer's tensor, on a CPU? -> axes. The newest entry
# that is not newer than the engine counts. vLLM's CUDA backends before 0.28 differ among
# themselves and must be named by the setting `axes`.
_AXES: tuple[tuple[int, int, bool, str], ...] = (
    (16, 5, True, "PBHND"),
    (25, 4, True, "BHNC"),
    (28, 4, False, "BHNC"),
    (30, 4, True, "BHNC"),
    (30, 4, False, "BHNC"),
)
_LAYOUT_SINCE_FUSED = 25  # K and V of a token side by side, from here on


@dataclass(frozen=True, slots=True)
class Geometry:
    """One rank's share of a block, how many ranks share one, and how many blocks each rank has."""

    layers: int
    heads: int
    head_size: int
    dtype: str
    parts: int
    tokens_per_block: int
    blocks: int
    ranks: int
    order: str

    @property
    def share(self) -> KVSpec:
        """One rank's share of a block."""
        return self._spec(self.layers)

    @property
    def whole(self) -> KVSpec:
        """A block of the manager: the shares of all ranks, one behind the other."""
        return self._spec(self.layers * self.ranks)

    def _spec(self, layers: int) -> KVSpec:
        return KVSpec.uniform(
            layers,
            self.heads,
            self.head_size,
            self.dtype,
            parts=self.parts,
            tokens_per_block=self.tokens_per_block,
            axes=self.order,
        )


def minor_version(version: str) -> int:
    """Return the minor number of a 0.x version; development builds count as the newest."""
    fields = version.split("+")[0].split(".")
    if len(fields) >= 2 and fields[0] == "0" and fields[1].isdigit():
        minor = int(fields[1])
        return minor if minor else 10_000
    return 10_000


def declared_axes(version: str, dimensions: int, *, on_cpu: bool) -> str:
    """Return the letters of a layer's tensor in this version of vLLM.

    Raises:
        LayoutError: this version's layout is not declared for such a tensor.
    """
    minor = minor_version(version)
    found = [
        axes
        for since, dims, cpu, axes in _AXES
        if since <= minor and dims == dimensions and cpu == on_cpu
    ]
    newest = [axes for since, dims, cpu, axes in _AXES if since <= minor and cpu == on_cpu]
    if not found or newest[-1] != found[-1]:
        raise LayoutError(
            f"vLLM {version} registered {dimensions}-dimensional KV tensors "
            f"{'on CPU' if on_cpu else 'on a device'}, whose layout is not declared for this "
            'version; name it with the setting "axes" of kv_connector_extra_config (for example '
            '"PBNHD" for K/V, block, token, head, element)'
        )
    return found[-1]


def describe(vllm_config: Any, kv_cache_config: Any, version: str) -> Geometry:
    """Read the geometry from vLLM's configuration.

    Args:
        kv_cache_config: None for vLLM's built-in connector, which does not hand it on.

    Raises:
        LayoutError: the model's KV cannot be served (hybrid, padded or quantized caches, context
            parallelism, pipeline stages), with the reason.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise LayoutError(f"flexkv does not serve engines with {name} > 1 yet")
    if parallel.pipeline_parallel_size > 1:
        raise LayoutError("flexkv does not serve pipeline-parallel engines yet")
    ranks = int(parallel.tensor_parallel_size)
    order = "HNPD" if minor_version(version) >= _LAYOUT_SINCE_FUSED else "PHND"
    if kv_cache_config is None:
        return _from_model(vllm_config, ranks, order)
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise LayoutError(
            f"the model has {len(groups)} KV cache groups ({kinds}); flexkv serves models with one "
            "group of full attention so far"
        )
    spec = groups[0].kv_cache_spec
    kind = type(spec).__name__
    if kind not in ("FullAttentionSpec", "MLAAttentionSpec"):
        raise LayoutError(f"flexkv does not serve {kind} caches yet, only full attention")
    _refuse_unusual(spec)
    parts = 1 if kind == "MLAAttentionSpec" else 2
    return Geometry(
        layers=len(groups[0].layer_names),
        heads=int(spec.num_kv_heads),
        head_size=int(spec.head_size),
        dtype=str(spec.dtype),
        parts=parts,
        tokens_per_block=int(spec.block_size),
        blocks=int(kv_cache_config.num_blocks),
        ranks=ranks,
        order=order,
    )


def _refuse_unusual(spec: Any) -> None:
    quantized = getattr(spec, "kv_quant_mode", None)
    unusual = {
        "its pages are padded": getattr(spec, "page_size_padded", None) is not None,
        "its pages are packed": getattr(spec, "num_head_slots", None) is not None
        or getattr(spec, "state_content_bytes", None) is not None,
        "it stores several tokens as one state": getattr(spec, "tokens_per_state", 1) != 1,
        "K and V differ in size": getattr(spec, "head_size_v", 0) not in (None, 0, spec.head_size),
        # 1 is fp8 with one scale per tensor, which belongs to the weights
        "its blocks carry quantization scales": quantized is not None and int(quantized) > 1,
    }
    for reason, met in unusual.items():
        if met:
            raise LayoutError(f"flexkv does not serve this KV cache: {reason}")


def _from_model(vllm_config: Any, ranks: int, order: str) -> Geometry:
    model, parallel, cache = (
        vllm_config.model_config,
        vllm_config.parallel_config,
        vllm_config.cache_config,
    )
    latent = bool(getattr(model, "use_mla", False))
    dtype = model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype
    return Geometry(
        layers=int(model.get_num_layers(parallel)),
        heads=1 if latent else int(model.get_num_kv_heads(parallel)),
        head_size=int(model.get_head_size()),
        dtype="float8_e4m3fn" if str(dtype) == "fp8" else str(dtype),
        parts=1 if latent else 2,
        tokens_per_block=int(cache.block_size),
        blocks=int(cache.num_gpu_blocks or 0),
        ranks=ranks,
        order=order,
    )
