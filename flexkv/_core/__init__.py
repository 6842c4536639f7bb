"""The C core: `lib` holds its functions (see the headers beside this file), `ffi` makes C values.

Every call releases the GIL, but for those in `held`. Arrays go in with
`ffi.from_buffer("uint32_t[]", array)`; what C keeps using after the call returns must be held by
the ticket (`Completions.ticket(keep=...)`).
"""

from flexkv._core import _native
from flexkv._core._native import ffi, lib

path: str = _native.__file__  # of the library

__all__ = ["ffi", "lib", "path"]
