"""`read_trace`: a file in any known format -> a Trace."""

from __future__ import annotations

import os
from pathlib import Path

from flexkv.errors import InputError
from flexkv.traces.lines import Progress
from flexkv.traces.model import Trace
from flexkv.traces.own import read_own


def read_trace(
    path: str | os.PathLike[str],
    *,
    tokens_per_block: int | None = None,
    strict: bool = False,
    progress: Progress | None = None,
) -> Trace:
    """Read a trace.

    Args:
        tokens_per_block: tokens of one block, where the file does not say; else it is inferred from
            the lengths.
        strict: refuse the file for its first malformed line instead of counting and skipping them
            (`trace.malformed`).
        progress: called with the bytes of the file that were read, and all.

    Raises:
        TraceError: the file cannot be read or (strict) has a malformed line.
    """
    if tokens_per_block is not None and tokens_per_block < 1:
        raise InputError(f"tokens_per_block is at least 1, got {tokens_per_block}")
    return read_own(Path(path), tokens_per_block=tokens_per_block, strict=strict, progress=progress)
