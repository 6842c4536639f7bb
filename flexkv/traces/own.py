"""Our own format: one JSON object a line, gzip or not, an optional header first. `read_own`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from flexkv.errors import TraceError
from flexkv.traces.lines import numbered_lines, trace_name
from flexkv.traces.model import Trace, TraceBuilder
from flexkv.traces.options import ReadOptions

VERSION = 1
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Header(msgspec.Struct):
    """The first line of a file that we wrote."""

    flexkv_trace: int
    tokens_per_block: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]
    name: str | None = None


class Row(msgspec.Struct):
    """One request of our own format."""

    timestamp_ms: float
    input_tokens: Count
    block_ids: list[int]
    output_tokens: Count = 0
    session: str | None = None


def read_own(path: Path, options: ReadOptions) -> Trace:
    """Read a trace in our own format."""
    name, size = trace_name(path), options.tokens_per_block
    builder = TraceBuilder(str(path), strict=options.strict)
    decode = msgspec.json.Decoder(Row).decode
    for number, line in numbered_lines(path, options.progress):
        try:
            if number == 1 and b'"flexkv_trace"' in line:
                header = msgspec.json.decode(line, type=Header)
                if header.flexkv_trace != VERSION:
                    raise TraceError(
                        f"{path} has version {header.flexkv_trace} of the trace format, "
                        f"this flexkv reads version {VERSION}; upgrade flexkv"
                    )
                name, size = header.name or name, options.agreed(path, header.tokens_per_block)
                continue
            row = decode(line)
            if size and len(row.block_ids) * size > row.input_tokens:
                raise msgspec.ValidationError(
                    f"{len(row.block_ids)} full blocks of {size} tokens do not fit into "
                    f"{row.input_tokens} tokens"
                )
            builder.add(
                number,
                row.timestamp_ms,
                row.session,
                row.input_tokens,
                row.output_tokens,
                row.block_ids,
            )
        except OverflowError:
            builder.reject(number, "a block id does not fit 64 bits")
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            builder.reject(number, str(error))
    return builder.build(name, size, options.coarsen)
