"""Emit the cffi glue (API mode) for sim.h: `main` writes the file that CMake compiles."""

from __future__ import annotations

import sys
from pathlib import Path

from cffi import FFI


def main(target: str) -> None:
    """Write the generated C file to `target`."""
    text = (Path(__file__).parent / "sim.h").read_text()
    ffi = FFI()
    ffi.cdef("\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")))
    source = '#include "sim.h"'
    ffi.set_source("flexkv_simulated._native._sim", source, py_limited_api=True)
    ffi.emit_c_code(target)


if __name__ == "__main__":
    main(sys.argv[1])
