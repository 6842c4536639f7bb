"""An accelerator for machines without one: the device backends `simulated` and `simulated_direct`.

`allocate`, `like` (tensors in its memory) - `Model` (how fast it is) - `Device` (streams, faults,
history).
"""

from __future__ import annotations

from flexkv_simulated.device import Device, Model
from flexkv_simulated.memory import DeviceTensor, allocate, like

__all__ = ["Device", "DeviceTensor", "Model", "allocate", "like"]
