"""Traces as files: `write_trace` (our own format, Mooncake's, or lengths as CSV)."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, cast

import msgspec

from flexkv.errors import InputError, TraceError
from flexkv.traces.lines import Progress
from flexkv.traces.model import Trace, TraceRequest
from flexkv.traces.own import VERSION, Header, Row

_EVERY_REQUESTS = 64


def write_trace(
    trace: Trace,
    path: str | os.PathLike[str],
    *,
    format: str = "flexkv",
    header: bool = True,
    progress: Progress | None = None,
) -> None:
    """Write a trace, packed where the name ends with .gz; ids are numbered anew, from 0.

    The same trace makes the same bytes. Mooncake's format has no sessions, and here no ids of
    partial last blocks; `lengths` has no ids at all.

    Args:
        format: one of WRITERS.
        header: begin with the line that tells the block size (our own format only).

    Raises:
        InputError: the format cannot be written.
        TraceError: the file cannot be written.
    """
    if format not in WRITERS:
        raise InputError(f"traces are written as {', '.join(WRITERS)}, not as {format!r}")
    first = [_header(trace)] if header and format == "flexkv" else []
    target, done = Path(path), 0
    try:
        with target.open("wb") as raw:
            if target.suffix == ".gz":
                file = cast("IO[bytes]", gzip.GzipFile("", "wb", fileobj=raw, mtime=0))
            else:
                file = raw
            with file:
                for done, line in enumerate(chain(first, WRITERS[format](trace))):
                    file.write(line + b"\n")
                    if progress is not None and done % _EVERY_REQUESTS == 0:
                        progress(done, len(trace.requests))
    except OSError as error:
        raise TraceError(f"cannot write the trace {target}: {error.strerror}") from error


def _header(trace: Trace) -> bytes:
    return msgspec.json.encode(Header(VERSION, trace.tokens_per_block, trace.name))


class _Renumbered:
    """Gives ids their numbers in the order of their first appearance."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def __call__(self, request: TraceRequest) -> list[int]:
        numbers = self._numbers
        return [numbers.setdefault(i, len(numbers)) for i in request.block_ids.tolist()]


def _own(trace: Trace) -> Iterator[bytes]:
    encode, numbered = msgspec.json.Encoder().encode, _Renumbered()
    for item in trace.requests:
        yield encode(
            Row(
                _plain(item.timestamp_ms),
                item.input_tokens,
                numbered(item),
                item.output_tokens,
                item.session,
            )
        )


def _mooncake(trace: Trace) -> Iterator[bytes]:
    encode, numbered = msgspec.json.Encoder().encode, _Renumbered()
    for item in trace.requests:
        row = {
            "timestamp": _plain(item.timestamp_ms),
            "input_length": item.input_tokens,
            "output_length": item.output_tokens,
            "hash_ids": numbered(item),
        }
        yield encode(row)


def _lengths(trace: Trace) -> Iterator[bytes]:
    yield b"arrival_s,input_tokens,output_tokens"
    for item in trace.requests:
        time_s = _plain(round(item.timestamp_ms / 1e3, 6))
        yield f"{time_s},{item.input_tokens},{item.output_tokens}".encode()


def _plain(number: float) -> float:
    """Return whole numbers as such, which makes files smaller."""
    return int(number) if number == int(number) else number


WRITERS: dict[str, Callable[[Trace], Iterator[bytes]]] = {
    "flexkv": _own,
    "mooncake": _mooncake,
    "lengths": _lengths,
}
