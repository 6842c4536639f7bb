"""Files as numbered lines, plain or gzip (told by content): `opened` - `numbered_lines` - `rows`
(JSON Lines, malformed ones rejected) - `trace_name`.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, TypeVar, cast

import msgspec

from flexkv.errors import TraceError
from flexkv.traces.model import TraceBuilder

Progress = Callable[[int, int], None]  # bytes of the file read, and in all
_GZIP = b"\x1f\x8b"
_EVERY_LINES = 256
_T = TypeVar("_T")


@contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], BufferedReader]]:
    """Open a file, unpacked if it is gzip; also give the file itself, for its position.

    Raises:
        TraceError: it cannot be opened or read, or is damaged.
    """
    try:
        with path.open("rb") as raw:
            if raw.peek(2)[:2] != _GZIP:
                yield raw, raw
            else:
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    yield cast("IO[bytes]", unpacked), raw
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(f"cannot read the trace {path}: {reason}") from error


def numbered_lines(path: Path, progress: Progress | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line) of every line that is not blank.

    Raises:
        TraceError: the file cannot be read.
    """
    with opened(path) as (lines, raw):
        size_bytes = path.stat().st_size
        for number, line in enumerate(lines, 1):
            if progress is not None and number % _EVERY_LINES == 0:
                progress(raw.tell(), size_bytes)
            if not line.isspace():
                yield number, line
        if progress is not None:
            progress(size_bytes, size_bytes)


def rows(
    path: Path, kind: type[_T], builder: TraceBuilder, progress: Progress | None = None
) -> Iterator[tuple[int, _T]]:
    """Yield (number of the line, what it says) of JSON Lines; those that are none are rejected."""
    decode = msgspec.json.Decoder(kind).decode
    for number, line in numbered_lines(path, progress):
        try:
            row = decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            builder.reject(number, str(error), str(path))
        else:
            yield number, row


def trace_name(path: Path) -> str:
    """Return the name of a trace that does not give itself one."""
    return path.name.removesuffix(".gz").rpartition(".")[0] or path.name
