"""Emit the cffi glue (API mode) for every header of the C core.

Verbs: `read_declarations` (headers -> cdef text), `main` (write the glue file that CMake compiles).
Each header is both the C header and the cdef: preprocessor lines are dropped, the rest is plain C.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cffi import FFI

HEADERS = (
    "slots.h",
    "hub.h",
    "crew.h",
    "ring.h",
    "records.h",
    "copy.h",
    "wire.h",
    "hash.h",
    "quant.h",
    "runs.h",
    "index.h",
    "holders.h",
    "hazard.h",
)


def read_declarations(folder: Path) -> str:
    """Return the declarations of all headers, without preprocessor lines."""
    lines: list[str] = []
    for name in HEADERS:
        text = (folder / name).read_text()
        lines += [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return "\n".join(lines)


def main(target: str) -> None:
    """Write the generated C file to `target`."""
    folder = Path(__file__).parent
    ffi = FFI()
    ffi.cdef(read_declarations(folder))
    includes = "\n".join(f'#include "{name}"' for name in HEADERS)
    ffi.set_source("flexkv._core._native", includes, py_limited_api=True)
    ffi.emit_c_code(target)


if __name__ == "__main__":
    main(sys.argv[1])
