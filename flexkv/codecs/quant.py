"""Group quantisation: `Int8` and `Int4`, in C (see `_core/quant.h` for the encoded bytes).

Keys are quantised per channel over the tokens of a block, values (and latents) per token over
neighbouring channels, at most 64 values a group: the choice of KIVI (Liu et al., ICML 2024), whose
reason, that keys have a few large channels and values have none, holds for SmolLM2 too. Steps are
bytes on a grid of 16 per octave, not fp16: with 16 tokens per block an fp16 step per channel would
cost an eighth of an int8 block. int8 is symmetric, int4 has zero points: they halve the error of
its keys (docs/codecs.md).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from flexkv._core import ffi, lib
from flexkv.codecs.layout import FLOATS, Part, parts
from flexkv.codecs.rows import Rows, address, check
from flexkv.errors import CapacityError, ConfigError
from flexkv.model import KVSpec
from flexkv.protocols import API_VERSION

if TYPE_CHECKING:
    from flexkv._core import CData

MAX_GROUP = 64
_MAX_ROW = 1024  # elements, FX_ROW_MAX of the kernels


class Plan(NamedTuple):
    """How the blocks of a spec are encoded: fx_quant_part[], how many, bytes of a block."""

    parts: CData
    n_parts: int
    encoded_bytes: int


class _Quantised:
    """What both widths share."""

    flexkv_api: ClassVar[int] = API_VERSION
    lossy: ClassVar[bool] = True
    bits: ClassVar[int]
    portable: ClassVar[bool] = False

    def encoded_bytes(self, spec: KVSpec) -> int:
        """Bytes of one encoded block, steps and zero points included.

        Raises:
            ConfigError: a dtype is not bfloat16, float16 or float32, or a head is too large.
        """
        return plan(spec, self.bits).encoded_bytes

    def encode(self, spec: KVSpec, source: Rows, target: Rows) -> None:
        """Quantise blocks [n, block_bytes] into [n, encoded_bytes], in this thread, without the
        interpreter's lock. NaNs and infinities are taken for the largest value of their sign.
        """
        how = plan(spec, self.bits)
        blocks = check(source, spec.block_bytes, target, how.encoded_bytes)
        if blocks and lib.fx_quant_encode(
            how.parts,
            how.n_parts,
            address(source),
            source.strides[0],
            address(target),
            target.strides[0],
            blocks,
            self.portable,
        ):
            raise CapacityError("no memory for the scales of one layer of KV")

    def decode(self, spec: KVSpec, source: Rows, target: Rows) -> None:
        """Fill blocks [n, block_bytes] from [n, encoded_bytes], in this thread, without the
        interpreter's lock.
        """
        how = plan(spec, self.bits)
        blocks = check(target, spec.block_bytes, source, how.encoded_bytes)
        if blocks:
            lib.fx_quant_decode(
                how.parts,
                how.n_parts,
                address(source),
                source.strides[0],
                address(target),
                target.strides[0],
                blocks,
                self.portable,
            )


class Int8(_Quantised):
    """8 bits per value. An error is at most half a step: 0.41 % of the group's largest value."""

    bits = 8


class Int4(_Quantised):
    """4 bits per value. An error is at most half a step: 3.5 % of the group's range."""

    bits = 4


@lru_cache(maxsize=64)
def plan(spec: KVSpec, bits: int) -> Plan:
    """Lay out the encoded block of a spec.

    Raises:
        ConfigError: a dtype is not bfloat16, float16 or float32, or a head is too large.
    """
    laid_out = []
    offset = 0
    for part in parts(spec):
        if part.dtype not in FLOATS:
            raise ConfigError(
                f"int{bits} quantises {', '.join(FLOATS)}, not {part.dtype}: choose no codec, or "
                "lossless"
            )
        if part.size > _MAX_ROW:
            raise ConfigError(f"int{bits}: a head of {part.size} elements is more than {_MAX_ROW}")
        laid_out.append(_fields(part, bits, offset))
        offset += lib.fx_quant_bytes(ffi.new("fx_quant_part *", laid_out[-1]))
    return Plan(ffi.new("fx_quant_part[]", laid_out), len(laid_out), offset)


def _fields(part: Part, bits: int, section: int) -> dict[str, int]:
    group = _even_share(part.tokens if part.is_key else part.size)
    heads = 1
    if part.head_stride == part.size * part.itemsize and part.size % group * (not part.is_key) == 0:
        # heads that lie side by side are one long row: fewer and longer loops, the same groups
        fitting = range(1, min(part.heads, _MAX_ROW // part.size) + 1)
        heads = max(count for count in fitting if part.heads % count == 0)
    return {
        "tokens": part.tokens,
        "heads": part.heads // heads,
        "size": part.size * heads,
        "token_stride": part.token_stride,
        "head_stride": part.head_stride * heads,
        "group": group,
        "over_tokens": part.is_key,
        "asymmetric": bits == 4,
        "bits": bits,
        "dtype": FLOATS.index(part.dtype),
        "offset": part.offset,
        "section": section,
    }


def _even_share(values: int) -> int:
    """Values of a group so that all groups of `values` are about as large."""
    groups = -(-values // MAX_GROUP)
    return -(-values // groups)
