"""What the conformance kit must know: what the device does not offer, a back door to the store."""

from __future__ import annotations

import numpy as np

from flexkv.testing import DeviceHarness, StorageHarness
from flexkv_example.store import HEAD


class ThreadHarness(DeviceHarness):
    """Memory of other processes is out of reach."""

    exportable = False


class FolderHarness(StorageHarness):
    """The files, read and written past the store."""

    exclusive = False  # nothing keeps a second process out

    def settings(self, place):
        return {"directories": [place]}

    def read_back(self, place, slot, key, spec):
        return np.frombuffer(self._file(place, slot).read_bytes(), np.uint8)[HEAD.itemsize :]

    def write_raw(self, place, slot, key, spec, data):
        path = self._file(place, slot)
        path.write_bytes(path.read_bytes()[: HEAD.itemsize] + data.tobytes())

    def _file(self, place, slot):
        return next(place.glob(f"*/{slot}"))
