"""A process with a GPU's memory: exports a region of it, says its handle, lives until killed."""

from __future__ import annotations

import asyncio
import sys

import numpy as np
from cuda_rig import SPEC, opened


async def main() -> None:
    """Fill every block with its number, print the handle as hex, then do what lines on stdin say:
    `look` prints the first byte of each block.
    """
    async with opened() as bench:
        for cache in bench.caches:
            for block in range(cache.shape[1]):
                cache.poke(block * 257, np.s_[:, block])
        region = bench.backend.make_region(bench.caches, SPEC, "PBNHD")
        sys.stdout.write(bench.backend.export_region(region).data.hex() + "\n")
        sys.stdout.flush()
        for _ in sys.stdin:
            seen = [int(bench.block(block)[0]) for block in range(16)]
            sys.stdout.write(" ".join(map(str, seen)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
