"""`MluBackend`: Cambricon MLUs through torch_mlu, on the portable base of torch devices."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

from flexkv.backends.torch_device import TorchDeviceBackend


class MluBackend(TorchDeviceBackend):
    """Copies between MLU tensors and the arena. Setting: `staging_bytes`."""

    name: ClassVar[str] = "mlu"
    module: ClassVar[str] = "mlu"

    @classmethod
    def accelerator(cls) -> Any:
        """Return torch.mlu, which torch_mlu adds to torch; None without it."""
        try:
            import_module("torch_mlu")
        except ImportError:
            return None
        return super().accelerator()
