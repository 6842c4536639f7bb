"""Short calls into the C core that keep the interpreter's lock: `tokens_negative`, `hash_chain`,
`index_match`, `index_pin`, with the arguments of their namesakes in `lib`; no pointer may be that
of a char.

Calls through `lib` release it, and get it back only when whoever took it meanwhile gives it up:
for a call of a few microseconds on the thread of an engine's scheduler that may cost milliseconds.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from flexkv._core import ffi, path

if TYPE_CHECKING:
    from flexkv._core import CData

_core, _cast, _ADDRESS = ctypes.PyDLL(path), ffi.cast, ffi.typeof("uintptr_t")
_pointer, _count = ctypes.c_void_p, ctypes.c_uint32

_tokens_negative = _core.fx_tokens_negative
_tokens_negative.argtypes = [_pointer, _count, ctypes.c_uint64]
_hash_chain = _core.fx_hash_chain
_hash_chain.argtypes = [_pointer, _count, _count, _count, _pointer, _pointer, _pointer]
_hash_chain.restype = None
_index_match = _core.fx_index_match
_index_match.argtypes = [_pointer, _pointer, _count, _pointer]
_index_match.restype = _count
_index_pin = _core.fx_index_pin
_index_pin.argtypes = [_pointer, _pointer, _count]


def _at(pointer: CData) -> int:
    return int(_cast(_ADDRESS, pointer))


def tokens_negative(tokens: CData, token_bytes: int, count: int) -> bool:
    """See fx_tokens_negative in hash.h."""
    return bool(_tokens_negative(_at(tokens), token_bytes, count))


def hash_chain(
    tokens: CData,
    token_bytes: int,
    tokens_per_block: int,
    blocks: int,
    secret: CData,
    root: CData,
    keys: CData,
) -> None:
    """See fx_hash_chain in hash.h."""
    size = tokens_per_block
    _hash_chain(_at(tokens), token_bytes, size, blocks, _at(secret), _at(root), _at(keys))


def index_match(index: CData, keys: CData, count: int, blocks: CData) -> int:
    """See fx_index_match in index.h."""
    matched: int = _index_match(_at(index), _at(keys), count, _at(blocks))
    return matched


def index_pin(index: CData, blocks: CData, count: int) -> int:
    """See fx_index_pin in index.h."""
    code: int = _index_pin(_at(index), _at(blocks), count)
    return code
