"""The device in C: `lib` and `ffi`, see sim.h."""

from __future__ import annotations

from typing import Any

from flexkv_simulated._native import _sim

ffi: Any = _sim.ffi
lib: Any = _sim.lib

__all__ = ["ffi", "lib"]
