"""A worker process for test_ranks: joins as the given rank and stays until it is killed."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from test_ranks import SHARE, fill, memory

from flexkv.ranks import RankAgent

if __name__ == "__main__":
    path, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    caches = memory()
    fill(caches, rank)
    agent = RankAgent(
        path, rank=rank, ranks=ranks, kv_caches=caches, spec=SHARE, axes="BHNC", retry_ms=10
    )
    agent.start()
    signal.pause()
