"""JSON Lines with a list of hash ids: `read_mooncake` (chained) - `read_qwen` (content hashes).

Mooncake: github.com/kvcache-ai/Mooncake, FAST25-release/traces; `timestamp` in ms, blocks of 512
tokens, the last id may stand for a partial block. Qwen-Bailian:
github.com/alibaba-edu/qwen-bailian-usagetraces-anon; `timestamp` in seconds, blocks of 16 tokens.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from flexkv.traces.chaining import Chainer
from flexkv.traces.lines import rows, trace_name
from flexkv.traces.model import Trace, TraceBuilder
from flexkv.traces.options import ReadOptions
from flexkv.traces.own import Count

_MOONCAKE_TOKENS, _QWEN_TOKENS = 512, 16


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: Count
    output_length: Count
    hash_ids: list[int]


class _Qwen(msgspec.Struct):
    timestamp: float
    input_length: Count
    output_length: Count
    hash_ids: list[int]
    chat_id: int
    parent_chat_id: int = -1


def read_mooncake(path: Path, options: ReadOptions) -> Trace:
    """Read a Mooncake trace; partial last blocks are dropped."""
    size = options.tokens_per_block or _MOONCAKE_TOKENS
    builder = TraceBuilder(str(path), strict=options.strict)
    for number, row in rows(path, _Mooncake, builder, options.progress):
        try:
            builder.add(
                number,
                row.timestamp,
                None,
                row.input_length,
                row.output_length,
                row.hash_ids[: row.input_length // size],
            )
        except OverflowError:
            builder.reject(number, "a hash id does not fit 64 bits")
    return builder.build(trace_name(path), size, options.coarsen)


def read_qwen(path: Path, options: ReadOptions) -> Trace:
    """Read a Qwen-Bailian trace: its ids are chained, partial last blocks are dropped.

    The session of a request is the first chat that its chain of parents leads to.
    """
    size = options.tokens_per_block or _QWEN_TOKENS
    builder, chainer = TraceBuilder(str(path), strict=options.strict), Chainer()
    sessions: dict[int, str] = {}
    for number, row in rows(path, _Qwen, builder, options.progress):
        session = sessions.get(row.parent_chat_id, str(row.chat_id))
        sessions[row.chat_id] = session
        builder.add(
            number,
            round(row.timestamp * 1e3, 3),
            session,
            row.input_length,
            row.output_length,
            chainer.extend(row.hash_ids[: row.input_length // size]),
        )
    return builder.build(trace_name(path), size, options.coarsen)
