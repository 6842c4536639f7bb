"""RAGPulse (github.com/flashserve/RAGPulse, data/): `read_ragpulse`.

A folder: `0_trace.jsonl` has the requests, each with the ids of its components; the other files say
how many tokens each id stands for. A prompt is taken to be system prompt, passages, history, web
search, user input, in this order (upstream does not say); it is cut into blocks and chained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from flexkv.errors import TraceError
from flexkv.traces.chaining import Chainer, Prompt
from flexkv.traces.lines import rows
from flexkv.traces.model import Trace, TraceBuilder
from flexkv.traces.options import ReadOptions
from flexkv.traces.own import Count

REQUESTS = "0_trace.jsonl"
_TOKENS = 64
_ORDER = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")


class _Request(msgspec.Struct):
    timestamp: float | str
    input_length: Count
    output_length: Count
    hash_ids: dict[str, list[int]]
    session_id: str | None = None


def read_ragpulse(path: Path, options: ReadOptions) -> Trace:
    """Read a RAGPulse folder, or the `0_trace.jsonl` in one.

    Raises:
        TraceError: the files with the lengths of the components are not there.
    """
    requests = path / REQUESTS if path.is_dir() else path
    others = sorted(requests.parent.glob("[1-9]_*.jsonl"))
    if not others:
        raise TraceError(
            f"{requests.parent} holds no file with the lengths of the components "
            "(1_sys_prompt.jsonl, ...); give the whole folder"
        )
    size = options.tokens_per_block or _TOKENS
    builder, chainer = TraceBuilder(str(requests), strict=options.strict), Chainer()
    lengths: dict[int, int] = {}
    for other in others:
        _read_lengths(other, builder, lengths)
    for number, row in rows(requests, _Request, builder, options.progress):
        try:
            timestamp_ms = round(float(row.timestamp) * 1e3, 3)
            parts = [(i, lengths[i]) for name in _ORDER for i in row.hash_ids.get(name, ())]
        except ValueError:
            builder.reject(number, f"timestamp {row.timestamp!r} is no number")
            continue
        except KeyError as error:
            builder.reject(number, f"component {error} has no length in the other files")
            continue
        prompt = Prompt(chainer, size)
        for part, tokens in parts:
            prompt.add(part, tokens)
        fitting = prompt.ids[: row.input_length // size]
        builder.add(
            number, timestamp_ms, row.session_id, row.input_length, row.output_length, fitting
        )
    return builder.build("ragpulse", size, options.coarsen)


def _read_lengths(path: Path, builder: TraceBuilder, lengths: dict[int, int]) -> None:
    """Read lines such as {"history_id": 20104, "token_length": 487}."""
    for number, row in rows(path, dict[str, Any], builder):
        tokens = row.pop("token_length", None)
        ids = [value for name, value in row.items() if "id" in name and isinstance(value, int)]
        if not isinstance(tokens, int) or tokens < 0 or len(ids) != 1:
            builder.reject(number, "expected one id and its token_length", str(path))
        else:
            lengths[ids[0]] = tokens
