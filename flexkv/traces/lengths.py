"""CSV with arrivals and lengths only: `read_lengths` (BurstGPT, Azure, and our own columns).

BurstGPT (github.com/HPMLL/BurstGPT): `Timestamp` in seconds, `Request tokens`, `Response tokens`,
newer files `Session ID`. Azure (github.com/Azure/AzurePublicDataset, AzureLLMInferenceTrace_*.csv):
`TIMESTAMP`, `ContextTokens`, `GeneratedTokens`. Ours: `arrival_s`, `input_tokens`,
`output_tokens`. Nothing in them says which prompts share a prefix, so that nothing about a prefix
cache follows from them, unless the caller says how to invent it (`fill`).
"""

from __future__ import annotations

import csv
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from flexkv.errors import TraceError
from flexkv.traces.chaining import Chainer, Prompt
from flexkv.traces.draws import Draws
from flexkv.traces.lines import numbered_lines, trace_name
from flexkv.traces.model import Trace, TraceBuilder
from flexkv.traces.options import ReadOptions

SYSTEM_TOKENS = 512  # shared by all sessions that `fill="chat"` invents
CONTINUES = 0.6  # chance that a request goes on with a session that it can go on with
MAX_OPEN = 4096  # sessions that may be gone on with
_TOKENS = 16


class Columns(NamedTuple):
    """Which columns say what, and how the time is written."""

    time: str
    input: str
    output: str
    to_s: Callable[[str], float]


def _clock(text: str) -> float:
    """Return the seconds since 1970 of a time such as 2023-11-16 18:15:46.6805900 (UTC)."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


COLUMNS = {
    "burstgpt": Columns("Timestamp", "Request tokens", "Response tokens", float),
    "azure": Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", _clock),
    "lengths": Columns("arrival_s", "input_tokens", "output_tokens", float),
}


class _Row(NamedTuple):
    line: int
    time_s: float
    session: str | None
    input_tokens: int
    output_tokens: int


def read_lengths(path: Path, options: ReadOptions, kind: str) -> Trace:
    """Read arrivals and lengths, and invent block ids as `fill` says; times begin at 0.

    Raises:
        TraceError: `fill` is not given.
    """
    if options.fill is None:
        raise TraceError(
            f"{path} has arrivals and lengths only, no block ids: which prompts share a prefix is "
            "not known, and no hit rate follows from it. Invent ids with fill='chat' (sessions "
            "that grow) or 'unique' (no sharing), or read the lengths with 'none' (--fill)"
        )
    builder = TraceBuilder(str(path), strict=options.strict)
    found = sorted(_read(path, options, builder, COLUMNS[kind]), key=lambda row: row.time_s)
    size = options.tokens_per_block or _TOKENS
    fill = {"none": _none, "unique": _unique, "chat": _chat}[options.fill]
    zero_s = found[0].time_s if found else 0.0
    for row, ids in fill(found, size, options.seed):
        time_ms = round((row.time_s - zero_s) * 1e3, 3)
        builder.add(row.line, time_ms, row.session, row.input_tokens, row.output_tokens, ids)
    return builder.build(trace_name(path), 0 if options.fill == "none" else size, options.coarsen)


def _read(
    path: Path, options: ReadOptions, builder: TraceBuilder, columns: Columns
) -> Iterator[_Row]:
    header: list[str] = []
    for number, line in numbered_lines(path, options.progress):
        try:
            cells = next(csv.reader([line.decode("utf-8-sig", "replace")]))
            if not header:
                header = _header(path, cells, columns)
            elif len(cells) != len(header):
                builder.reject(number, f"{len(cells)} cells instead of {len(header)}")
            else:
                yield _row(number, dict(zip(header, cells, strict=True)), columns)
        except TraceError:  # a ValueError too
            raise
        except (csv.Error, ValueError, OverflowError) as error:
            builder.reject(number, str(error))


def _header(path: Path, cells: list[str], columns: Columns) -> list[str]:
    header = [cell.strip() for cell in cells]
    if missing := {columns.time, columns.input, columns.output} - set(header):
        raise TraceError(f"{path} has no column {', '.join(sorted(missing))}: {header}")
    return header


def _row(line: int, cells: Mapping[str, str], columns: Columns) -> _Row:
    time_s = columns.to_s(cells[columns.time].strip())
    lengths = [int(float(cells[name])) for name in (columns.input, columns.output)]
    if min(lengths) < 0 or max(lengths) >= 1 << 40 or not abs(time_s) < 1e15:
        raise ValueError(f"time {time_s} or lengths {lengths} cannot be")
    return _Row(line, time_s, cells.get("Session ID") or None, *lengths)


_Filled = Iterator[tuple[_Row, list[int]]]


def _none(found: list[_Row], size: int, seed: int) -> _Filled:
    return ((row, []) for row in found)


def _unique(found: list[_Row], size: int, seed: int) -> _Filled:
    """Give every request blocks that nobody else has."""
    chainer = Chainer()
    for number, row in enumerate(found):
        prompt = Prompt(chainer, size)
        prompt.add(number, row.input_tokens)
        yield row, prompt.ids


def _chat(found: list[_Row], size: int, seed: int) -> _Filled:
    """Make requests turns of sessions.

    A request goes on with its own session where the file names one. Else, with a chance of
    CONTINUES, it goes on with the open session of the longest history that fits into its prompt.
    All sessions begin with the same SYSTEM_TOKENS tokens.
    """
    chainer, draws = Chainer(), Draws(seed)
    named: dict[str, Prompt] = {}
    open_sessions: list[tuple[int, int, Prompt]] = []  # by tokens of their history
    for number, row in enumerate(found):
        prompt = None
        if row.session is not None:
            prompt = named.get(row.session)
            if prompt is not None and prompt.tokens > row.input_tokens:
                prompt = None
        elif draws.chance(CONTINUES):
            place = bisect_right(open_sessions, row.input_tokens, key=lambda item: item[0])
            prompt = open_sessions.pop(place - 1)[2] if place else None
        if prompt is None:
            prompt = Prompt(chainer, size)
            prompt.add("system", min(SYSTEM_TOKENS, row.input_tokens))
        prompt.add(number, row.input_tokens - prompt.tokens)
        yield row, prompt.ids.copy()
        prompt.add((number, "answer"), row.output_tokens)
        if row.session is not None:
            named[row.session] = prompt
        else:
            insort(open_sessions, (prompt.tokens, number, prompt))
            if len(open_sessions) > MAX_OPEN:
                open_sessions.pop(0)
