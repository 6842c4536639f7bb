"""The plug-in's own harness, and trouble on purpose, which only the fake torch_mlu offers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from flexkv_mlu.harness import MluHarness


class FakeMluHarness(MluHarness):
    """The harness of flexkv-mlu with `hold` and `fail`."""

    def hold(self, backend: Any, services: Any) -> Any:
        return torch.mlu.pause()  # type: ignore[attr-defined]

    @contextmanager
    def fail(self, backend: Any, services: Any) -> Iterator[None]:
        torch.mlu.broken = True  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.mlu.broken = False  # type: ignore[attr-defined]
