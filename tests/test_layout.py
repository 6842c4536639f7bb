"""Layouts: strides become planes of the longest segments; wrong and unclear ones are refused."""

from __future__ import annotations

import random
from typing import Any

import kv_layouts
import numpy as np
import pytest

from flexkv.backends.layout import make_region, merge_planes, plane_extent
from flexkv.errors import LayoutError
from flexkv.model import KVSpec, LayerGroup
from flexkv.protocols import Region

SPEC = KVSpec.uniform(3, 4, 32, tokens_per_block=16)


def caches(axes: str, spec: KVSpec = SPEC, blocks: int = 10, **options: Any) -> list[Any]:
    rng = random.Random(1)
    return [
        kv_layouts.build(axes, spec, spec.group_of(layer), blocks, rng, **options)
        for layer in range(spec.layers)
    ]


def read(region: Region, memory: list[np.ndarray[Any, Any]], block: int, size: int) -> bytes:
    """Collect a block's bytes the slow way, straight from the definition in copy.h."""
    out = bytearray(size)
    spans = []
    for array in memory:
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        spans.append((root.__array_interface__["data"][0], root.reshape(-1).view(np.uint8)))
    for plane in region.planes:
        loops = [(1, 0)] * (3 - len(plane.loops)) + list(plane.loops)
        at = plane.offset
        for i in range(loops[0][0]):
            for j in range(loops[1][0]):
                for k in range(loops[2][0]):
                    place = plane.base + block * plane.block_stride
                    place += i * loops[0][1] + j * loops[1][1] + k * loops[2][1]
                    base, data = next(s for s in spans if s[0] <= place < s[0] + s[1].size)
                    out[at : at + plane.segment_bytes] = data[
                        place - base : place - base + plane.segment_bytes
                    ].tobytes()
                    at += plane.segment_bytes
    return bytes(out)


@pytest.mark.parametrize("order", ["PNHD", "PHND", "NPHD", "HNPD"])
@pytest.mark.parametrize("axes", kv_layouts.PER_LAYER)
@pytest.mark.parametrize("plain", [True, False])
def test_planes_describe_the_block_in_canonical_order(axes: str, order: str, plain: bool) -> None:
    spec = KVSpec.uniform(3, 4, 32, tokens_per_block=16, axes=order)
    kv = caches(axes, spec, plain=plain)
    region = make_region(kv, spec, axes)
    assert region.blocks == 10
    assert all(len(plane.loops) <= 3 for plane in region.planes)
    views = [kv_layouts.by_letters(tensor, axes, 16, 2) for tensor in kv]
    for block in (0, 3, 9):
        want = kv_layouts.block_of(views, block, order).tobytes()
        assert read(region, kv, block, spec.block_bytes) == want


@pytest.mark.parametrize(
    ("axes", "order", "segments", "segment_bytes"),
    [
        ("BPNHD", "PNHD", 1, 2 * 16 * 4 * 32 * 2),  # the same order: a layer is one segment
        ("PBNHD", "PNHD", 2, 16 * 4 * 32 * 2),  # K and V apart
        ("BPHND", "PHND", 1, 2 * 16 * 4 * 32 * 2),
        ("BHNC", "HNPD", 1, 2 * 16 * 4 * 32 * 2),
        ("BPHND", "PNHD", 2 * 16 * 4, 64),  # heads and tokens change places
        ("BHNC", "PNHD", 2 * 16 * 4, 64),
        ("TPHD", "PNHD", 2 * 16, 4 * 32 * 2),
    ],
)
def test_segments_are_as_long_as_both_orders_allow(
    axes: str, order: str, segments: int, segment_bytes: int
) -> None:
    spec = KVSpec.uniform(3, 4, 32, tokens_per_block=16, axes=order)
    region = make_region(caches(axes, spec, plain=True), spec, axes)
    assert len(region.planes) == 3
    for plane in region.planes:
        assert plane.segment_bytes == segment_bytes
        assert np.prod([count for count, _ in plane.loops], dtype=int) == segments


def test_block_first_memory_merges_into_one_segment() -> None:
    group = SPEC.groups[0]
    tensor = kv_layouts.build("BLPNHD", SPEC, group, 10, random.Random(2), plain=True)
    region = make_region(tensor, SPEC, "BLPNHD")
    assert [plane.layer for plane in region.planes] == [0, 1, 2]
    (merged,) = merge_planes(region.planes)
    assert merged.segment_bytes == SPEC.block_bytes == merged.block_stride
    low, high = plane_extent(merged, region.blocks)
    assert (low, high - low) == (tensor.__array_interface__["data"][0], tensor.nbytes)
    layer_first = make_region(caches("PBNHD", plain=True), SPEC, "PBNHD")
    assert merge_planes(layer_first.planes) == layer_first.planes


@pytest.mark.parametrize("axes", ["BPNHD", "PBNHD", "BPHND", "BHNC", "TPHD", "LBPNHD", "BLHNC"])
def test_axes_are_found_where_sizes_leave_one_reading(axes: str) -> None:
    if "L" in axes:
        kv: Any = kv_layouts.build(axes, SPEC, SPEC.groups[0], 10, random.Random(3))
    else:
        kv = caches(axes)
    found, declared = make_region(kv, SPEC), make_region(kv, SPEC, axes)
    assert (found.planes, found.blocks) == (declared.planes, declared.blocks)


def test_dimensions_of_one_may_trade_places() -> None:
    latent = KVSpec.uniform(2, 1, 40, parts=1, tokens_per_block=16)
    rng = random.Random(4)
    for axes in ("BND", "BN1D", "TD", "1TD", "BNHD", "BPNHD"):
        kv = [kv_layouts.build(axes, latent, latent.groups[0], 7, rng) for _ in range(2)]
        assert make_region(kv, latent).planes == make_region(kv, latent, axes).planes


@pytest.mark.parametrize(
    ("shape", "spec", "readings"),
    [
        ((10, 2, 4, 4, 32), KVSpec.uniform(1, 4, 32, tokens_per_block=4), {"BPNHD", "BPHND"}),
        ((2, 2, 16, 4, 32), KVSpec.uniform(1, 4, 32), {"BPNHD", "PBNHD"}),
        ((16, 2, 16, 4, 32), KVSpec.uniform(1, 4, 32), {"BPNHD", "NPBHD"}),
    ],
)
def test_unclear_layouts_are_refused_and_the_readings_listed(
    shape: tuple[int, ...], spec: KVSpec, readings: set[str]
) -> None:
    with pytest.raises(LayoutError, match="declare axes") as caught:
        make_region([np.zeros(shape, np.uint16)], spec)
    assert all(reading in str(caught.value) for reading in readings)
    for reading in readings:
        make_region([np.zeros(shape, np.uint16)], spec, reading)


def zeros(*shape: int, dtype: Any = np.uint16) -> np.ndarray[Any, Any]:
    return np.zeros(shape, dtype)


def read_only() -> np.ndarray[Any, Any]:
    array = zeros(10, 2, 16, 4, 32)
    array.flags.writeable = False
    return array


GOOD = (10, 2, 16, 4, 32)


@pytest.mark.parametrize(
    ("tensor", "axes", "message"),
    [
        (zeros(10, 2, 16, 4, 31), None, "does not match the KVSpec"),
        (zeros(10, 2, 16, 4, 31), "BPNHD", "axis D .* size 31, the KVSpec says 32"),
        (zeros(10, 2, 16, 4), "BPNHD", "has 4 dimensions"),
        (zeros(10, 16, 4, 32), "BNHD", r"lack P \(part\), of which there are 2"),
        (zeros(*GOOD, dtype=np.float16), None, "dtype float16, the KVSpec says bfloat16"),
        (zeros(*GOOD, dtype=np.float32), None, "dtype float32"),
        (np.broadcast_to(zeros(1, 2, 16, 4, 32), GOOD), "BPNHD", "read-only"),
        (
            np.lib.stride_tricks.as_strided(zeros(2, 16, 4, 32), GOOD, (0, 4096, 256, 64, 2)),
            "BPNHD",
            "overlaps itself",
        ),
        (
            np.lib.stride_tricks.as_strided(zeros(*GOOD), GOOD, (4096, 4096, 256, 64, 2)),
            "BPNHD",
            "overlaps itself",
        ),
        (read_only(), None, "read-only"),
        (zeros(0, 2, 16, 4, 32), None, "empty"),
        (zeros(15, 2, 4, 32), "TPHD", "15 tokens are less than a block of 16"),
        (zeros(*GOOD), "BPNHX", "use each of"),
        (zeros(*GOOD), "PNNHD", "use each of"),
        (zeros(*GOOD), "TPNHD", "use each of"),
        (zeros(*GOOD), "PNHD", "use each of"),
        (zeros(*GOOD), "BPNHC", "use each of"),
        (zeros(*GOOD), "BPNHD,BND", "2 layouts for 1 layer groups"),
        ("text", None, "expected a tensor, or a tuple of 2"),
        ((zeros(10, 16, 4, 32),), None, "tuple of 2"),
    ],
)
def test_wrong_tensors_are_refused_with_the_reason(tensor: Any, axes: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make_region([tensor, *([zeros(*GOOD)] * 0)], KVSpec.uniform(1, 4, 32), axes)


def test_layers_must_agree_with_the_spec_and_with_each_other() -> None:
    with pytest.raises(LayoutError, match="2 layers, the KVSpec has 3"):
        make_region(caches("BPNHD")[:2], SPEC)
    uneven = caches("BPNHD")
    uneven[1] = zeros(11, 2, 16, 4, 32)
    with pytest.raises(LayoutError, match=r"same number of blocks, but .* has 10, .* has 11"):
        make_region(uneven, SPEC)
    mixed = [caches("BPNHD")[0], caches("PBNHD")[1], caches("BPNHD")[2]]
    with pytest.raises(LayoutError, match=r"axis B|axis P|same number of blocks"):
        make_region(mixed, SPEC, "BPNHD")
    with pytest.raises(LayoutError, match=r"give .*layer name"):
        make_region(7, SPEC)


def test_a_region_passes_through_and_names_order_layers() -> None:
    kv = caches("BPNHD", plain=True)
    region = make_region({f"layer.{i}": tensor for i, tensor in enumerate(kv)}, SPEC, "bpnhd")
    assert make_region(region, SPEC) is region
    bases = [tensor.__array_interface__["data"][0] for tensor in kv]
    assert [plane.base for plane in region.planes] == bases
    assert [plane.offset for plane in region.planes] == SPEC.layer_offsets()


def test_each_layer_group_has_its_own_axes() -> None:
    spec = KVSpec(
        (
            LayerGroup((0, 2), heads=4, head_size=32),
            LayerGroup((1,), heads=1, head_size=40, dtype="fp8", parts=1),
        )
    )
    rng = random.Random(5)
    forms = ["BHNC", "BND", "BHNC"]
    kv = [kv_layouts.build(axes, spec, spec.group_of(i), 9, rng) for i, axes in enumerate(forms)]
    region = make_region(kv, spec, "BHNC,BND")
    assert region.planes == make_region(kv, spec).planes
    views = [
        kv_layouts.by_letters(tensor, forms[i], 16, spec.group_of(i).parts)
        for i, tensor in enumerate(kv)
    ]
    want = b"".join(kv_layouts.block_of([view], 4, "PNHD").tobytes() for view in views)
    assert read(region, kv, 4, spec.block_bytes) == want
    with pytest.raises(LayoutError, match="cannot hold several layer groups"):
        make_region(kv[0], spec)


@pytest.mark.parametrize("order", ["PNHD", "HNPD", "NPHD"])
def test_parts_may_be_tensors_of_their_own(order: str) -> None:
    spec = KVSpec.uniform(2, 4, 32, axes=order)
    rng = random.Random(6)
    pairs = [
        tuple(kv_layouts.build("1HTD", spec, spec.groups[0], 6, rng) for _ in "KV")
        for _ in range(2)
    ]
    region = make_region(pairs, spec, "1HTD")
    views = [
        np.concatenate([kv_layouts.by_letters(part, "1HTD", 16, 1) for part in pair], axis=2)
        for pair in pairs
    ]
    memory = [part for pair in pairs for part in pair]
    for block in (0, 5):
        want = kv_layouts.block_of(views, block, order).tobytes()
        assert read(region, memory, block, spec.block_bytes) == want


@pytest.mark.torch
def test_torch_tensors_give_the_planes_of_their_numpy_twins() -> None:
    torch = pytest.importorskip("torch")
    kv = [torch.zeros(10, 16, 2, 4, 32, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    twins = [tensor.view(torch.uint16).numpy() for tensor in kv]
    region = make_region(kv, SPEC)
    assert region.planes == make_region(twins, SPEC).planes
    assert region.owner is kv
    with pytest.raises(LayoutError, match="overlaps itself"):
        make_region([torch.zeros(1, 2, 16, 4, 32).bfloat16().expand(GOOD)] * 3, SPEC)
    with pytest.raises(LayoutError, match="dtype float16"):
        make_region([torch.zeros(GOOD, dtype=torch.float16)] * 3, SPEC)
    fp8 = KVSpec.uniform(1, 4, 32, "fp8")
    make_region([torch.zeros(GOOD, dtype=torch.float8_e4m3fn)], fp8)
    make_region([torch.zeros(GOOD, dtype=torch.uint8)], fp8)
