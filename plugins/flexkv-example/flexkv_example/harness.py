"""What the conformance kit must know about the store: its settings, and a back door to its files."""

from __future__ import annotations

import numpy as np

from flexkv.testing import StorageHarness
from flexkv_example.store import HEAD


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
