"""Request traces: who asked when for which prefixes, as block ids, without any text.

`read_trace` (a file in one of `FORMATS` -> a Trace) - `block_keys` (ids -> keys of the index) -
`Trace`, `TraceRequest`, `Malformed`.
"""

from __future__ import annotations

from flexkv.traces.model import Malformed, Trace, TraceRequest, block_keys
from flexkv.traces.reading import READERS, read_trace

FORMATS = tuple(READERS)

__all__ = ["FORMATS", "Malformed", "Trace", "TraceRequest", "block_keys", "read_trace"]
