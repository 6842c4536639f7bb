"""A fake torch_mlu over host memory: adds `torch.mlu` and `device="mlu:0"` to torch.

Streams are threads, late at random (`toy_accelerator`). `torch.mlu.pause()` keeps all streams;
`torch.mlu.broken = True` makes waiting raise, as after an error of the driver.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from toy_accelerator import Toy


class FakeMluTensor(torch.Tensor):
    """Host memory that says it lies on an MLU."""

    device = SimpleNamespace(type="mlu", index=0)  # type: ignore[assignment]

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


_zeros = torch.zeros


def _fake_zeros(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
    if device == "mlu:0":
        return _zeros(*size, **options).as_subclass(FakeMluTensor)
    return _zeros(*size, device=device, **options)


torch.zeros = _fake_zeros
torch.mlu = Toy()  # type: ignore[attr-defined]
