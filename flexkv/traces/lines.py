"""Files as numbered lines: `numbered_lines`, `opened` (plain or gzip, told by content)."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, cast

from flexkv.errors import TraceError

Progress = Callable[[int, int], None]  # bytes of the file read, and in all
_GZIP = b"\x1f\x8b"
_EVERY_LINES = 256


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
