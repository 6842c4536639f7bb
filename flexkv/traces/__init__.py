"""Request traces: who asked when for which prefixes, as block ids, without any text.

`read_trace` (a file in one of `FORMATS` -> a Trace), `write_trace` - `generate` (a workload from a
seed) - `Recorder` (what a live manager is asked for) - `summarize` (figures of a trace) -
`block_keys` (ids -> keys of the index) - `Trace`, `TraceRequest`, `Malformed`.
"""

from __future__ import annotations

from flexkv.traces.generators import generate
from flexkv.traces.model import Malformed, Trace, TraceRequest, block_keys
from flexkv.traces.reading import READERS, read_trace
from flexkv.traces.recording import Recorder
from flexkv.traces.stats import TraceStats, summarize
from flexkv.traces.writing import write_trace

FORMATS = tuple(READERS)

__all__ = [
    "FORMATS",
    "Malformed",
    "Recorder",
    "Trace",
    "TraceRequest",
    "TraceStats",
    "block_keys",
    "generate",
    "read_trace",
    "summarize",
    "write_trace",
]
