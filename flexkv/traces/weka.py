"""Claude Code sessions as WEKA's kv-cache-tester keeps them: `read_weka`.

One JSON object a session (a folder of `*.json`, one file, or JSON Lines), from
github.com/callanjfox/kv-cache-tester, traces/. Block ids are local to a session; a request of type
"subagent" holds requests of its own. Times are seconds from the start of the session, and when
that was is not known: it is drawn, evenly over a day, from `seed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flexkv.errors import TraceError
from flexkv.traces.chaining import ROOT, Chainer
from flexkv.traces.draws import Draws
from flexkv.traces.lines import opened, trace_name
from flexkv.traces.model import Trace, TraceBuilder
from flexkv.traces.options import ReadOptions

SPREAD_S = 86_400.0
_SUBAGENT = "subagent"


class _Session(msgspec.Struct):
    id: str
    block_size: int
    requests: list[msgspec.Raw]
    hash_id_scope: str = "local"


class _Entry(msgspec.Struct):
    t: float
    type: str
    input_tokens: int = msgspec.field(name="in", default=-1)
    output_tokens: int = msgspec.field(name="out", default=0)
    hash_ids: list[int] = msgspec.field(default_factory=list)
    agent_id: str = ""
    requests: list[msgspec.Raw] = msgspec.field(default_factory=list)


def read_weka(path: Path, options: ReadOptions) -> Trace:
    """Read a folder or file of sessions.

    The times of a sub-agent's requests count from its call in some files and from the start of the
    session in others: where no sub-agent of a session starts before its call, they are taken for
    the latter.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"the folder {path} holds no *.json")
    draws = Draws(options.seed)
    builder, chainer = TraceBuilder(str(path), strict=options.strict), Chainer()
    sizes: set[int] = set()
    for done, file in enumerate(files):
        if options.progress is not None:
            options.progress(done, len(files))
        for line, session in _sessions(file, builder):
            sizes.add(session.block_size)
            _Reader(file, line, session, builder, chainer).read(draws.uniform() * SPREAD_S)
    if len(sizes) > 1:
        raise TraceError(f"{path} mixes block sizes: {sorted(sizes)}")
    size = options.agreed(path, sizes.pop()) if sizes else 0
    return builder.build(trace_name(path), size, options.coarsen)


def _sessions(file: Path, builder: TraceBuilder) -> Iterator[tuple[int, _Session]]:
    with opened(file) as (content, _):
        text = content.read()
    try:
        documents = [(1, msgspec.json.decode(text, type=_Session))]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        lines = text.splitlines()
        if sum(not line.isspace() for line in lines if line) < 2 or b'"requests"' not in lines[0]:
            builder.reject(1, str(error), str(file))
            return
        documents = []
        for number, line in enumerate(lines, 1):
            if line and not line.isspace():
                try:
                    documents.append((number, msgspec.json.decode(line, type=_Session)))
                except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
                    builder.reject(number, str(wrong), str(file))
    for number, session in documents:
        if session.block_size < 1:
            builder.reject(number, f"block_size is {session.block_size}", str(file))
        else:
            yield number, session


@dataclass(slots=True)
class _Node:
    """An entry, where it stands, and those of a sub-agent inside it."""

    where: str
    entry: _Entry
    inside: list[_Node]


class _Reader:
    """Reads one session into a builder."""

    def __init__(
        self, file: Path, line: int, session: _Session, builder: TraceBuilder, chainer: Chainer
    ) -> None:
        self._file, self._line, self._session = str(file), line, session
        self._builder, self._chainer = builder, chainer
        self._root = ROOT if session.hash_id_scope == "global" else (self._file, session.id)
        self._agents = 0

    def read(self, start_s: float) -> None:
        """Add the requests of the session and of its sub-agents."""
        nodes = self._decoded(self._session.requests, "requests")
        starts = [(node.entry.t, node.inside[0].entry.t) for node in nodes if node.inside]
        self._absolute = any(call for call, _ in starts) and all(t >= call for call, t in starts)
        self._add(nodes, start_s, self._session.id)

    def _decoded(self, raw: list[msgspec.Raw], place: str) -> list[_Node]:
        found = []
        for number, item in enumerate(raw):
            where = f"{place}[{number}]"
            try:
                entry = msgspec.json.decode(item, type=_Entry)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                self._reject(where, str(error))
                continue
            agent = entry.type == _SUBAGENT
            if not agent and min(entry.input_tokens, entry.output_tokens) < 0:
                self._reject(where, '"in" or "out" is missing or negative')
                continue
            inside = self._decoded(entry.requests, f"{where}.requests") if agent else []
            found.append(_Node(where, entry, inside))
        return found

    def _reject(self, where: str, reason: str) -> None:
        self._builder.reject(self._line, f"{where}: {reason}", self._file)

    def _add(self, nodes: list[_Node], start_s: float, session: str) -> None:
        size = self._session.block_size
        for node in nodes:
            entry = node.entry
            if entry.type == _SUBAGENT:
                self._agents += 1
                name = f"{self._session.id}/{entry.agent_id or f'agent_{self._agents:03d}'}"
                self._add(node.inside, start_s if self._absolute else start_s + entry.t, name)
                continue
            self._builder.add(
                self._line,
                round((start_s + entry.t) * 1e3, 3),
                session,
                entry.input_tokens,
                entry.output_tokens,
                self._chainer.extend(entry.hash_ids[: entry.input_tokens // size], self._root),
            )
