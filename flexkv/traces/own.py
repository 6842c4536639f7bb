"""Our own format: one JSON object a line, gzip or not, an optional header first. `read_own`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from flexkv.errors import TraceError
from flexkv.traces.lines import Progress, numbered_lines
from flexkv.traces.model import Trace, TraceBuilder

VERSION = 1
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]


class Header(msgspec.Struct):
    """The first line of a file that we wrote."""

    flexkv_trace: int
    tokens_per_block: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]
    name: str | None = None


class _Line(msgspec.Struct):
    timestamp_ms: float
    input_tokens: _Count
    block_ids: list[int]
    output_tokens: _Count = 0
    session: str | None = None


def read_own(
    path: Path,
    *,
    tokens_per_block: int | None = None,
    strict: bool = False,
    progress: Progress | None = None,
) -> Trace:
    """Read a trace in our own format.

    Raises:
        TraceError: the file cannot be read, is of a newer version, or (strict) has a bad line.
    """
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    builder = TraceBuilder(str(path), strict=strict)
    decode = msgspec.json.Decoder(_Line).decode
    for number, line in numbered_lines(path, progress):
        try:
            if number == 1 and b'"flexkv_trace"' in line:
                header = msgspec.json.decode(line, type=Header)
                if header.flexkv_trace != VERSION:
                    raise TraceError(
                        f"{path} has version {header.flexkv_trace} of the trace format, "
                        f"this flexkv reads version {VERSION}; upgrade flexkv"
                    )
                name = header.name or name
                tokens_per_block = tokens_per_block or header.tokens_per_block
                continue
            row = decode(line)
            ids = row.block_ids
            if tokens_per_block and len(ids) * tokens_per_block > row.input_tokens:
                raise msgspec.ValidationError(
                    f"{len(ids)} full blocks of {tokens_per_block} tokens do not fit into "
                    f"{row.input_tokens} tokens"
                )
            builder.add(
                number, row.timestamp_ms, row.session, row.input_tokens, row.output_tokens, ids
            )
        except OverflowError:
            builder.reject(number, "a block id does not fit 64 bits")
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            builder.reject(number, str(error))
    return builder.build(name, tokens_per_block)
