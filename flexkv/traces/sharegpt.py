"""ShareGPT: conversations as text, a JSON array or JSON Lines: `read_sharegpt`.

Every answer is a request whose prompt is all that stands before it. Tokens come from a tokenizer
that the caller gives; without one, a token is taken to be `characters_per_token` characters, and
blocks are pieces of so many characters, compared by content. There are no times: conversations
begin as a Poisson process, CONVERSATIONS_PER_S, and turns follow after THINK_S on average. No text
is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np

from flexkv.traces.chaining import ROOT, Chainer
from flexkv.traces.draws import Draws
from flexkv.traces.lines import numbered_lines, opened, trace_name
from flexkv.traces.model import Trace, TraceBuilder
from flexkv.traces.options import ReadOptions, Tokenize

CONVERSATIONS_PER_S = 1.0
THINK_S = 30.0
_TOKENS = 16
_ANSWERS = {"gpt", "assistant", "chatgpt", "bing", "bard", "model"}


class _Message(msgspec.Struct):
    source: str | None = msgspec.field(name="from", default=None)
    role: str | None = None
    value: str | None = None
    content: str | None = None


class _Conversation(msgspec.Struct):
    conversations: list[_Message]
    id: str | int | None = None


def read_sharegpt(path: Path, options: ReadOptions) -> Trace:
    """Read conversations; those that have no answer make no request."""
    size = options.tokens_per_block or _TOKENS
    builder, chainer = TraceBuilder(str(path), strict=options.strict), Chainer()
    draws, start_s = Draws(options.seed), 0.0
    for line, where, raw in _documents(path, options):
        try:
            conversation = msgspec.json.decode(raw, type=_Conversation)
            texts = [_text(message) for message in conversation.conversations]
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            builder.reject(line, f"{where}{error}")
            continue
        start_s += draws.exponential(1 / CONVERSATIONS_PER_S)
        session = str(len(builder) if conversation.id is None else conversation.id)
        growing = _Growing(chainer, size, options)
        time_s = start_s
        for role, text in texts:
            before, ids = growing.tokens, growing.ids.copy() if role in _ANSWERS else []
            growing.add(f"{role}\n", text)
            if role in _ANSWERS and before:
                answer = growing.tokens - before
                builder.add(line, round(time_s * 1e3, 3), session, before, answer, ids)
                time_s += draws.exponential(THINK_S)
    return builder.build(trace_name(path), size, options.coarsen)


def _documents(path: Path, options: ReadOptions) -> Iterator[tuple[int, str, bytes | msgspec.Raw]]:
    """Yield (line, place within it, one conversation)."""
    with opened(path) as (content, _):
        is_array = content.read(64).lstrip()[:1] == b"["
    if not is_array:
        for number, line in numbered_lines(path, options.progress):
            yield number, "", line
        return
    with opened(path) as (content, _):
        text = content.read()
    try:
        items = msgspec.json.decode(text, type=list[msgspec.Raw])
    except msgspec.MsgspecError:
        yield 1, "", text  # the reader finds and reports the same
        return
    for number, item in enumerate(items):
        if options.progress is not None and number % 256 == 0:
            options.progress(number, len(items))
        yield 1, f"[{number}]: ", item


def _text(message: _Message) -> tuple[str, str]:
    role = message.source or message.role
    text = message.value if message.value is not None else message.content
    if role is None or text is None:
        raise msgspec.ValidationError('a message has no "from" or no "value"')
    return role, text


class _Growing:
    """The prompt of a conversation, one message after the other."""

    def __init__(self, chainer: Chainer, tokens_per_block: int, options: ReadOptions) -> None:
        self._chainer, self._size, self._per_token = chainer, tokens_per_block, 1.0
        self._encode: Callable[[str], bytes]
        if options.tokenize is None:
            # UTF-32: every character is four bytes, so that pieces can be cut
            self._encode, self._unit = _characters, 4
            self._per_token = options.characters_per_token
        else:
            self._encode, self._unit = _tokens(options.tokenize), 8
        self._piece = max(1, round(tokens_per_block * self._per_token)) * self._unit
        self._rest, self._units = b"", 0
        self.ids: list[int] = []

    @property
    def tokens(self) -> int:
        """Tokens so far; never fewer than the blocks hold."""
        return max(int(self._units / self._per_token), len(self.ids) * self._size)

    def add(self, role: str, text: str) -> None:
        """Append a message."""
        new = self._encode(role) + self._encode(text)
        self._units += len(new) // self._unit
        self._rest += new
        whole = len(self._rest) // self._piece * self._piece
        pieces = [
            blake2b(self._rest[at : at + self._piece], digest_size=16).digest()
            for at in range(0, whole, self._piece)
        ]
        self._rest = self._rest[whole:]
        self.ids += self._chainer.extend(pieces, self.ids[-1] if self.ids else ROOT)


def _characters(text: str) -> bytes:
    return text.encode("utf-32-le", "surrogatepass")


def _tokens(tokenize: Tokenize) -> Callable[[str], bytes]:
    return lambda text: np.array(list(tokenize(text)), "<i8").tobytes()
