"""C views of arrays survive the garbage collector, whatever cycle they are in."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import gc
import numpy as np
from flexkv.backends.disk.format import pointer

class Box:
    pass

def make():
    array = np.zeros(8, np.uint64)
    view = pointer("uint64_t", array)
    box = Box()
    box.me, box.view = box, view

for _ in range(100):
    make()
gc.collect()
"""


def test_a_view_in_a_cycle_is_collected_without_a_crash() -> None:
    """As frames of a traceback make them; in a process of its own, since it used to crash."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
