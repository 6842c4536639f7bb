"""What vLLM's KV memory looks like: from its configuration to a KVSpec, from its version to axes.

`describe` (configuration -> Geometry, the same in every process of an engine) - `ServedGroup` -
`declared_axes` (version and dimensions -> letters). Nothing is guessed: what is not declared here
is refused with LayoutError, and sizes are held against the tensors when they are registered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from flexkv.errors import LayoutError
from flexkv.model import CacheGroup, KVSpec, LayerGroup

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
_SERVED = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec")
_REFUSED = {
    "MambaSpec": "state-space layers keep a state, not tokens: run this model without flexkv",
    "ChunkedLocalAttentionSpec": "start vLLM with --disable-hybrid-kv-cache-manager",
    "SlidingWindowMLASpec": "start vLLM with --disable-hybrid-kv-cache-manager",
}
_LAYOUT_SINCE_FUSED = 25  # K and V of a token side by side, from here on


@dataclass(frozen=True, slots=True)
class ServedGroup:
    """One of vLLM's KV cache groups: its number there, what flexkv calls it, its layers here."""

    number: int
    cache: CacheGroup
    layer_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a block of the manager is made of, and which groups of layers have blocks.

    All groups share the engine's blocks and its memory: the first layer of each lies in one
    tensor, the second in the next. A block is one page in each of these tensors, whichever group
    it is given to, and `stages` says how many there are in each pipeline stage. `replica` is the
    data-parallel rank.
    """

    stages: tuple[int, ...]
    heads: int
    head_size: int
    dtype: str
    parts: int
    tokens_per_block: int
    blocks: int
    tensor_ranks: int
    order: str
    groups: tuple[ServedGroup, ...]
    replica: int = 0

    @property
    def ranks(self) -> int:
        """Workers that hold a share of every block."""
        return len(self.stages) * self.tensor_ranks

    @property
    def ranks_label(self) -> str:
        """Whose shares a block holds, for the identity: they lie stage by stage."""
        split = ":" + "+".join(map(str, self.stages)) if len(self.stages) > 1 else ""
        return f"tp{self.tensor_ranks},pp{len(self.stages)}{split},dp{self.replica}"

    def rank(self, stage: int, tensor_rank: int) -> int:
        """Number a worker among those."""
        return stage * self.tensor_ranks + tensor_rank

    def share(self, rank: int) -> KVSpec:
        """What one worker holds of a block."""
        return self._spec(self.stages[rank // self.tensor_ranks])

    @property
    def whole(self) -> KVSpec:
        """A block of the manager: the shares of all workers, one behind the other."""
        return self._spec(sum(self.stages) * self.tensor_ranks)

    @property
    def by_block(self) -> bool:
        """Whether a prefix may be cut at any block: one group, which needs all that comes before.

        Otherwise a load is of use as a whole or not at all.
        """
        return len(self.groups) == 1 and not self.groups[0].cache.window_tokens

    def tensors(self, kv_caches: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors whose pages make a block, of what vLLM registers by layer.

        Raises:
            LayoutError: a layer is missing, or the groups do not share these tensors.
        """
        names = max((group.layer_names for group in self.groups), key=len)
        if len(self.groups) == 1:
            return dict(kv_caches)
        missing = [name for group in self.groups for name in group.layer_names]
        missing = [name for name in missing if name not in kv_caches]
        if missing:
            raise LayoutError(f"vLLM registered no KV tensor for {missing[0]}")
        pages = [_page(kv_caches[name]) for name in names]
        for group in self.groups:
            for name, page in zip(group.layer_names, pages, strict=False):
                if _page(kv_caches[name]) != page:
                    raise LayoutError(
                        f"the KV tensor of {name} does not lie where those of the other groups do "
                        "(address, bytes from block to block); start vLLM with "
                        "--disable-hybrid-kv-cache-manager"
                    )
        return {name: kv_caches[name] for name in names}

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


def _page(tensor: Any) -> tuple[int, int, int]:
    return tensor.data_ptr(), tensor.stride(0) * tensor.element_size(), tensor.shape[0]


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
        LayoutError: the model's KV cannot be served (state-space layers, padded or quantized
            caches, context parallelism), with the reason.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise LayoutError(f"flexkv does not serve engines with {name} > 1 yet")
    order = "HNPD" if minor_version(version) >= _LAYOUT_SINCE_FUSED else "PHND"
    replica = int(getattr(parallel, "data_parallel_index", 0))
    if kv_cache_config is None:
        return _from_model(vllm_config, order, replica)
    groups = _served(kv_cache_config)
    specs = [kv_cache_config.kv_cache_groups[group.number].kv_cache_spec for group in groups]
    layers = max(len(group.layer_names) for group in groups)
    spec = specs[[len(group.layer_names) for group in groups].index(layers)]
    return Geometry(
        stages=_stages(vllm_config, layers, len(groups)),
        heads=int(spec.num_kv_heads),
        head_size=int(spec.head_size),
        dtype=str(spec.dtype),
        parts=1 if type(spec).__name__ == "MLAAttentionSpec" else 2,
        tokens_per_block=int(spec.block_size),
        blocks=int(kv_cache_config.num_blocks),
        tensor_ranks=int(parallel.tensor_parallel_size),
        order=order,
        groups=groups,
        replica=replica,
    )


def _served(kv_cache_config: Any) -> tuple[ServedGroup, ...]:
    """The groups whose blocks are cached; LayoutError if one of them cannot be."""
    every = kv_cache_config.kv_cache_groups
    numbers = getattr(kv_cache_config, "prefix_cacheable_group_ids", range(len(every)))
    if not numbers:
        raise LayoutError("the model has no KV cache that could be kept")
    groups = []
    for number in numbers:
        spec, names = every[number].kv_cache_spec, tuple(every[number].layer_names)
        kind = type(spec).__name__
        if kind not in _SERVED:
            raise LayoutError(
                f"flexkv does not serve {kind} caches ({names[0]} and {len(names) - 1} more "
                f"layers); {_REFUSED.get(kind, 'run this model without flexkv')}"
            )
        _refuse_unusual(spec)
        window = 0
        if kind == "SlidingWindowSpec":
            window = int(spec.sliding_window) - 1 + int(getattr(spec, "extra_retained_tokens", 0))
        # bytes of a block depend on which layers share it, in which order
        label = f"{kind}:{','.join(names)}" if len(numbers) > 1 else ""
        groups.append(ServedGroup(int(number), CacheGroup(label, window), names))
    _refuse_uneven([every[number].kv_cache_spec for number in numbers])
    return tuple(groups)


def _refuse_uneven(specs: Sequence[Any]) -> None:
    """All groups must have blocks of equal tokens and equal bytes."""
    for what, sizes in {
        "tokens per block": {int(spec.block_size) for spec in specs},
        "bytes per block and layer": {_page_bytes(spec) for spec in specs},
    }.items():
        if len(sizes) > 1:
            raise LayoutError(
                f"the model's KV cache groups differ in {what} ({sorted(sizes)}); start vLLM with "
                "--disable-hybrid-kv-cache-manager"
            )


def _page_bytes(spec: Any) -> int:
    parts = 1 if type(spec).__name__ == "MLAAttentionSpec" else 2
    layer = LayerGroup((0,), int(spec.num_kv_heads), int(spec.head_size), str(spec.dtype), parts)
    return layer.layer_bytes(int(spec.block_size))


def _stages(vllm_config: Any, layers: int, groups: int) -> tuple[int, ...]:
    """Layers of each pipeline stage."""
    parallel = vllm_config.parallel_config
    count = int(parallel.pipeline_parallel_size)
    if count == 1:
        return (layers,)
    if groups > 1:
        raise LayoutError(
            f"flexkv does not serve {groups} KV cache groups over {count} pipeline stages yet; "
            "start vLLM with --disable-hybrid-kv-cache-manager"
        )
    model, tensor_ranks = vllm_config.model_config, int(parallel.tensor_parallel_size)
    stages = []
    for stage in range(count):
        worker = SimpleNamespace(
            rank=stage * tensor_ranks,
            tensor_parallel_size=tensor_ranks,
            pipeline_parallel_size=count,
        )
        start, end = model.get_layers_start_end_indices(worker)
        stages.append(int(end - start))
    if layers not in stages:
        raise LayoutError(
            f"a pipeline stage has {layers} layers with a KV cache, the model's are spread as "
            f"{stages}; flexkv serves stages whose layers all have one"
        )
    return tuple(stages)


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


def _from_model(vllm_config: Any, order: str, replica: int) -> Geometry:
    model, parallel, cache = (
        vllm_config.model_config,
        vllm_config.parallel_config,
        vllm_config.cache_config,
    )
    latent = bool(getattr(model, "use_mla", False))
    dtype = model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype
    return Geometry(
        stages=_stages(vllm_config, int(model.get_num_layers(parallel)), 1),
        heads=1 if latent else int(model.get_num_kv_heads(parallel)),
        head_size=int(model.get_head_size()),
        dtype="float8_e4m3fn" if str(dtype) == "fp8" else str(dtype),
        parts=1 if latent else 2,
        tokens_per_block=int(cache.block_size),
        blocks=int(cache.num_gpu_blocks or 0),
        tensor_ranks=int(parallel.tensor_parallel_size),
        order=order,
        groups=(ServedGroup(0, CacheGroup()),),
        replica=replica,
    )
