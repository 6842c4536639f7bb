"""Harnesses of the built-in backends: `CpuHarness`, `DiskHarness`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from flexkv.protocols import DeviceBackend, Services
from flexkv.testing.harness import CREW_QUEUE, DeviceHarness
from flexkv.testing.held_crew import full, held


class CpuHarness(DeviceHarness):
    """The `cpu` backend. Its hardware is the crew, for copies above `inline_bytes`."""

    def settings(self, place: Path) -> dict[str, Any]:
        """Copies of more than a block or two go to the crew, unless told otherwise."""
        return {"inline_bytes": 8192} | self.options

    def hold(self, backend: DeviceBackend, services: Services) -> AbstractContextManager[None]:
        """Keep the crew's threads."""
        return held(services.completions.crew)

    def fail(self, backend: DeviceBackend, services: Services) -> AbstractContextManager[None]:
        """Leave no room in the crew's queue."""
        return full(services.completions.crew, CREW_QUEUE)
