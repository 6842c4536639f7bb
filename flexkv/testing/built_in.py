"""Harnesses of what is built in: `CpuHarness`, `DiskHarness`, `RanksHarness` (none), `QuantHarness`
(codecs).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv.backends.disk import DiskBackend
from flexkv.backends.disk.format import DATA_NAME
from flexkv.model import KVSpec
from flexkv.protocols import DeviceBackend, Services, StorageBackend
from flexkv.testing.faults import Where, inject
from flexkv.testing.harness import (
    CREW_QUEUE,
    Bytes,
    CodecHarness,
    DeviceHarness,
    StorageHarness,
    Unsupported,
)
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


class RanksHarness(DeviceHarness):
    """The `ranks` backend has no memory of its own: workers copy with the device backend of theirs.

    Raises:
        Unsupported: always.
    """

    def __init__(self, plugin: Any, options: Any = None) -> None:
        raise Unsupported("ranks commands other device backends: verify those")


class DiskHarness(StorageHarness):
    """The `disk` backend, in `directories` folders. Its crew's work stands for the device's."""

    directories = 2

    def settings(self, place: Path) -> dict[str, Any]:
        """Stripe over folders of `place`."""
        paths = [place / f"ssd{number}" for number in range(self.directories)]
        return {"directories": paths} | self.options

    def read_back(self, place: Path, slot: int, key: NDArray[np.uint64], spec: KVSpec) -> Bytes:
        """Read the block from its data file."""
        path, offset = self._where(place, slot, spec)
        return np.fromfile(path, np.uint8, spec.block_bytes, offset=offset)

    def write_raw(
        self, place: Path, slot: int, key: NDArray[np.uint64], spec: KVSpec, data: Bytes
    ) -> None:
        """Overwrite the block in its data file."""
        path, offset = self._where(place, slot, spec)
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data.tobytes())

    def _where(self, place: Path, slot: int, spec: KVSpec) -> tuple[Path, int]:
        local, directory = divmod(slot, self.directories)
        return place / f"ssd{directory}" / DATA_NAME, local * spec.stride_bytes

    def hold(self, backend: StorageBackend, services: Services) -> AbstractContextManager[None]:
        """Keep the crew's threads, which compute checksums and write records."""
        return held(services.completions.crew)

    @contextmanager
    def fail(
        self, backend: StorageBackend, services: Services, verb: str, skip: int, count: int
    ) -> Iterator[None]:
        """Have the device say EIO."""
        assert isinstance(backend, DiskBackend)
        on: Where = "read" if verb == "read" else "write"
        faults = inject(backend, services.arena)
        faults.add(on, "EIO", skip=skip, times=count)
        try:
            yield
        finally:
            faults.clear()


class QuantHarness(CodecHarness):
    """`int8` and `int4`: floats only, and as exact as their formulas say."""

    dtypes = ("bfloat16", "float16", "float32")

    def __init__(self, plugin: Any, options: Any = None) -> None:
        super().__init__(plugin, options)
        # half a step: of 254 for a range of twice the largest, of 15 with the grid's 4.4 %; and
        # what a result loses when it is rounded to bfloat16
        steps = {8: 127, 4: 7.5}[plugin.bits]
        self.max_error = 0.5 * 2 ** (1 / 16) / steps + 2**-8
