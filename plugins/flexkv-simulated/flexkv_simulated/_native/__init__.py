"""The device in C: `lib` and `ffi`, see sim.h."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_sim: Any = import_module("flexkv_simulated._native._sim")  # made by CMake
ffi, lib = _sim.ffi, _sim.lib

__all__ = ["ffi", "lib"]
