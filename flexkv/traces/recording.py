"""A live manager's requests as a trace: `Recorder` - `unused` (a path that overwrites nothing).

Nothing of a prompt is kept but how long it was and which numbers its blocks have; a number says
that two prefixes are equal and nothing else, and the keys that it was given for are forgotten with
the recorder.
"""

from __future__ import annotations

import os
from array import array
from math import inf
from pathlib import Path
from typing import Protocol

from flexkv.errors import InputError
from flexkv.model import KeyArray
from flexkv.traces.model import Trace, TraceBuilder
from flexkv.traces.writing import write_trace

MAX_BLOCKS = 1 << 24


class Asked(Protocol):
    """What a manager calls for every request: "get", "put" or "prefetch", the tokens of the prompt,
    the keys of its whole blocks (of a get: as far as they may be loaded), and the time in seconds.
    """

    def __call__(self, kind: str, tokens: int, keys: KeyArray, now_s: float) -> None: ...


class Watched(Protocol):
    """The telemetry of a manager, as far as a recorder needs it."""

    on_request: Asked | None


class Recorder:
    """Records what an open KVManager is asked for, from now until `stop`.

    Every get is a request. A put tells how long the answer to the latest get of its prompt was; one
    that no get came before is a request of its own. Prefetches are not recorded.
    """

    def __init__(
        self,
        telemetry: Watched,
        tokens_per_block: int,
        *,
        max_blocks: int = MAX_BLOCKS,
        repeats_s: float = 0.0,
    ) -> None:
        """Listen to a manager by its `kv.telemetry`.

        Args:
            max_blocks: limits what is kept; later requests are counted in `lost`.
            repeats_s: a get of the same prompt, this soon after the last one and before any put of
                it, is the same request: schedulers ask again while a request waits.

        Raises:
            InputError: somebody else listens already.
        """
        if telemetry.on_request is not None:
            raise InputError("this manager is recorded already; one recorder at a time")
        self._telemetry, self.tokens_per_block = telemetry, tokens_per_block
        self.max_blocks, self._repeats_s = max_blocks, repeats_s
        self.lost = 0
        self._numbers: dict[bytes, int] = {}
        self._times_s, self._inputs, self._outputs = array("d"), array("q"), array("q")
        self._waiting_s = array("d")  # when a request was last asked for; -inf: it was put
        self._ids, self._ends = array("q"), array("q", [0])
        self._open: dict[int, int] = {}  # last block of a prompt -> its latest request
        telemetry.on_request = self._asked

    def __len__(self) -> int:
        return len(self._times_s)

    def stop(self) -> None:
        """Listen no more."""
        if self._telemetry.on_request == self._asked:
            self._telemetry.on_request = None

    def trace(self, name: str = "recorded") -> Trace:
        """Return what was recorded so far; times begin at 0."""
        builder = TraceBuilder(name)
        zero_s = self._times_s[0] if self._times_s else 0.0
        for i, time_s in enumerate(self._times_s):
            time_ms = round((time_s - zero_s) * 1e3, 3)
            ids = self._ids[self._ends[i] : self._ends[i + 1]].tolist()
            builder.add(i + 1, time_ms, None, self._inputs[i], self._outputs[i], ids)
        return builder.build(name, self.tokens_per_block)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was recorded so far, in our own format.

        Raises:
            TraceError: the file cannot be written.
        """
        write_trace(self.trace(), path)

    def _asked(self, kind: str, tokens: int, keys: KeyArray, now_s: float) -> None:
        names: list[bytes] = keys.view("V16").ravel().tolist()
        known = {"get": self._repeated, "put": self._answered}.get(kind)
        if known is None or known(tokens, names, now_s):
            return
        if len(self._ids) + len(names) > self.max_blocks:
            self.lost += 1
            return
        numbers = self._numbers
        ids = [numbers.setdefault(name, len(numbers)) for name in names]
        if ids:
            self._open[ids[-1]] = len(self)
        self._times_s.append(now_s)
        self._waiting_s.append(now_s)
        self._inputs.append(tokens)
        self._outputs.append(0)
        self._ids.fromlist(ids)
        self._ends.append(len(self._ids))

    def _repeated(self, tokens: int, names: list[bytes], now_s: float) -> bool:
        """Whether a get is one that waits already."""
        last = self._numbers.get(names[-1], -1) if names else -1
        request = self._open.get(last)
        if request is None or self._inputs[request] != tokens:
            return False
        if now_s - self._waiting_s[request] >= self._repeats_s:
            return False
        self._waiting_s[request] = now_s
        return True

    def _answered(self, tokens: int, names: list[bytes], now_s: float) -> bool:
        """Whether a put belongs to a request that is known; note the length of its answer."""
        for name in reversed(names):
            request = self._open.get(self._numbers.get(name, -1))
            if request is not None and self._inputs[request] <= tokens:
                answer = tokens - self._inputs[request]
                self._outputs[request] = max(self._outputs[request], answer)
                self._waiting_s[request] = -inf
                return True
        return False


def unused(path: Path) -> Path:
    """Return the path, or, where a file has it, the first of name-2, name-3, ... that is free."""
    stem, dot, rest = path.name.partition(".")
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{stem}-{number}{dot}{rest}")
    return free
