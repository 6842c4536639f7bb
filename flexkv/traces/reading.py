"""Files in any known format: `read_trace` - `detect` (which format a file has, by content)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from flexkv.errors import InputError, TraceError
from flexkv.traces.hash_lists import read_mooncake, read_qwen
from flexkv.traces.lengths import COLUMNS, read_lengths
from flexkv.traces.lines import Progress, opened
from flexkv.traces.model import Trace
from flexkv.traces.options import ReadOptions, Tokenize
from flexkv.traces.own import read_own
from flexkv.traces.ragpulse import REQUESTS, read_ragpulse
from flexkv.traces.sharegpt import read_sharegpt
from flexkv.traces.weka import read_weka

READERS: dict[str, Callable[[Path, ReadOptions], Trace]] = {
    "flexkv": read_own,
    "mooncake": read_mooncake,
    "qwen": read_qwen,
    "weka": read_weka,
    "ragpulse": read_ragpulse,
    "sharegpt": read_sharegpt,
    **{kind: partial(read_lengths, kind=kind) for kind in COLUMNS},
}
_LOOK_BYTES = 1 << 16
_LOOK_LINES = 20


def read_trace(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    tokens_per_block: int | None = None,
    coarsen: int = 1,
    strict: bool = False,
    progress: Progress | None = None,
    seed: int = 0,
    fill: str | None = None,
    tokenize: Tokenize | None = None,
    characters_per_token: float = 4.0,
) -> Trace:
    """Read a trace.

    Args:
        format: one of `flexkv.traces.FORMATS`; None: told by the content.
        tokens_per_block: tokens of one block where the file does not say; None: what the format
            has by custom, or inferred from the lengths.
        coarsen: make one block of so many.
        strict: refuse the file for its first malformed line instead of counting and skipping them
            (`trace.malformed`).
        progress: called with how much was read, and of how much.
        seed: for what is drawn: starts of WEKA sessions, times of ShareGPT turns, `fill`.
        fill: how ids are invented where there are none (CSV): "chat", "unique", or "none".
        tokenize, characters_per_token: how ShareGPT text becomes tokens.

    Raises:
        TraceError: the file cannot be read, has an unknown format, or (strict) a malformed line.
        InputError: an argument cannot be used.
    """
    if format is not None and format not in READERS:
        raise InputError(f"unknown trace format {format!r}; known: {', '.join(READERS)}")
    options = ReadOptions(
        tokens_per_block, coarsen, strict, progress, seed, fill, tokenize, characters_per_token
    )
    source = Path(path)
    return READERS[format or detect(source)](source, options)


def detect(path: Path) -> str:
    """Tell the format of a file or folder by its content.

    Raises:
        TraceError: it cannot be read or looks like nothing known.
    """
    if path.is_dir():
        if (path / REQUESTS).exists():
            return "ragpulse"
        if any(path.glob("*.json")):
            return "weka"
        raise TraceError(f"the folder {path} holds neither {REQUESTS} nor *.json")
    with opened(path) as (content, _):
        start = content.read(_LOOK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    found = None
    if start[:1] == b"[":
        found = "sharegpt"
    elif b"{" in start[:_LOOK_BYTES]:
        found = _by_lines(start) or _by_names(start)
    else:
        header = {
            cell.strip() for cell in start.split(b"\n")[0].decode(errors="replace").split(",")
        }
        for kind, columns in COLUMNS.items():
            if {columns.time, columns.input, columns.output} <= header:
                found = kind
    if found is None:
        raise TraceError(
            f"{path} looks like no known trace; say which it is with format (--format), one of "
            + ", ".join(READERS)
        )
    return found


def _by_lines(start: bytes) -> str | None:
    for line in start.split(b"\n")[:_LOOK_LINES]:
        try:
            row = msgspec.json.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        if isinstance(row, dict) and (found := _by_fields(row)):
            return found
    return None


def _by_fields(row: dict[str, Any]) -> str | None:
    if "flexkv_trace" in row or "block_ids" in row:
        return "flexkv"
    if "requests" in row and "block_size" in row:
        return "weka"
    if "conversations" in row:
        return "sharegpt"
    if "hash_ids" not in row:
        return None
    if isinstance(row["hash_ids"], dict):
        return "ragpulse"
    return "qwen" if "chat_id" in row else "mooncake"


def _by_names(start: bytes) -> str | None:
    """Tell by names of fields, where the first object is longer than what was read."""
    names = ("requests", "block_size", "conversations", "block_ids")
    return _by_fields({name: None for name in names if f'"{name}"'.encode() in start})
