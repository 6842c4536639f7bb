"""Small traces for tests of the simulator: `made_requests` (prompts share prefixes at random)."""

from __future__ import annotations

import numpy as np

from flexkv.traces import TraceRequest


def made_requests(seed: int, count: int, *, longest: int = 12) -> list[TraceRequest]:
    """Return requests whose prompts extend, repeat or branch off earlier ones, or are new."""
    random = np.random.default_rng(seed)
    paths: list[list[int]] = []
    fresh = 0
    requests = []
    for number in range(count):
        path: list[int] = []
        if paths and random.random() < 0.7:
            earlier = paths[int(random.integers(len(paths)))]
            path = earlier[: int(random.integers(0, len(earlier) + 1))]
        length = int(random.integers(max(1, len(path)), longest + 1))
        path = [*path, *range(fresh, fresh + length - len(path))]
        fresh += length
        paths.append(path)
        ids = np.array(path, np.int64)
        requests.append(TraceRequest(number * 250.0, None, len(path) * 16 + 3, 20, ids))
    return requests
