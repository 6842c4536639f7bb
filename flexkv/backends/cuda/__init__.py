"""NVIDIA GPUs through the CUDA runtime that is there (12 or 13), found at run time.

`CudaBackend` (backend.py) - `Cuda` (library.py: the calls, and where the libraries are) - `choose`
(choice.py: which copies a batch becomes) - `Lanes` (lanes.py: streams, events and who waits for
what) - `Pins` (pins.py: host memory that the GPU reaches) - sharing.py (handles for other
processes). The kernel is move.cu; move.ptx is made from it by scripts/make_ptx.sh.
"""

from flexkv.backends.cuda.backend import CudaBackend

__all__ = ["CudaBackend"]
