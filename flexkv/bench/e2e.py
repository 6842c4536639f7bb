"""Put and get through a whole manager, next to what the machine can do and to LMCache: `run`.

The KV of Llama-3-8B in bfloat16: blocks of 16 tokens are 2 MiB. Every comparison is interleaved in
one run, and every way is checked once for the right bytes before it is timed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flexkv.bench.cache import LLAMA, Blocks, DeviceMemory, OpenCache, Tokens, prompts
from flexkv.bench.overhead import one_block
from flexkv.bench.report import (
    Progress,
    Result,
    interleave,
    median,
    ratio_of_pairs,
)
from flexkv.bench.yardsticks import (
    CopyLimit,
    Peer,
    PeerError,
    disk_read_speed,
    find_lmcache,
)
from flexkv.errors import ConfigError
from flexkv.model import KVSpec

_GIGA = 1e9
_LEAST_TOKENS = 128  # of a get; more clients than that makes prompts share them
_ROUNDS = 3  # of every client, one after the other: as many requests are in flight all the time


@dataclass(frozen=True, slots=True)
class _Setup:
    """What all parts of the benchmark share."""

    spec: KVSpec
    tokens: int
    repeats: int
    threads: int
    sources: Blocks
    targets: Blocks

    @property
    def size_bytes(self) -> int:
        return len(self.sources) * self.spec.block_bytes

    def speed(self, seconds: float) -> float:
        return self.size_bytes / seconds / _GIGA

    def params(self, requests: int) -> dict[str, Any]:
        return {
            "requests": requests,
            "tokens": self.tokens,
            "size_bytes": self.size_bytes,
            "block_bytes": self.spec.block_bytes,
            "threads": self.threads,
        }

    def split(self, requests: int, name: int = 0) -> list[Tokens]:
        """Cut all tokens into as many prompts."""
        return prompts(requests, self.tokens // requests, name)


def run(
    progress: Progress,
    *,
    directory: Path | str | None = None,
    lmcache_python: Path | str | None = None,
    requests: str | int | Sequence[int] = "1,16,64,256",
    tokens: int = 8192,
    repeats: int = 5,
    hits: int = 2000,
    host_bytes: int | None = None,
    spec: KVSpec = LLAMA,
) -> list[Result]:
    """Measure `put`, `host_get` and `disk_get` with so many `requests` at once, `tokens` in all;
    the time of a `host_hit_one_block`; and the gets against LMCache where it is installed.

    Args:
        directory: where files are made (and removed); its file system is what is measured.
        lmcache_python: interpreter that has lmcache; default: this one.
        hits: samples of `host_hit_one_block`.
        host_bytes: host tier; default: what the tokens need.

    Raises:
        ConfigError: tokens are no whole blocks for each of the requests.
        TransferError: other bytes came back, or fewer.
    """
    counts = _counts(requests)
    blocks = tokens // spec.tokens_per_block
    if any(tokens % (count * spec.tokens_per_block) for count in counts) or not blocks:
        raise ConfigError(
            f"{tokens} tokens cannot be shared by {counts} requests in whole blocks of "
            f"{spec.tokens_per_block}"
        )
    order = np.random.default_rng(0)
    threads = max(1, min(4, len(os.sched_getaffinity(0))))
    setup = _Setup(
        spec, tokens, repeats, threads, order.permutation(blocks), order.permutation(blocks)
    )
    device = DeviceMemory(spec, blocks)
    memory: dict[str, Any] = {"host_cache_bytes": max(host_bytes or 0, blocks * spec.stride_bytes)}
    exactly: dict[str, Any] = {"host_cache_bytes": blocks * spec.stride_bytes}
    python = find_lmcache(lmcache_python)
    steps = _Steps(progress, 2 * len(counts) + 3)
    results: list[Result] = []
    limit = CopyLimit(spec, device, threads)
    try:
        with OpenCache.open(spec, device, **memory) as cache:
            for count in counts:
                steps.next(f"host, {count} at once")
                results += _host(setup, cache, limit, count)
            steps.next("host, LMCache")
            results.append(_against_lmcache(setup, cache, "host_get", python, None))
    finally:
        limit.close()
    steps.next("one block")
    results.append(one_block(spec, device, hits))
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix="flexkv-bench-") as path,
        _disk_cache(setup, device, Path(path), exactly) as cache,
    ):
        for count in counts:
            steps.next(f"disk, {count} at once")
            results.append(_disk(setup, cache, Path(path), count))
        steps.next("disk, LMCache")
        results.append(_against_lmcache(setup, cache, "disk_get", python, Path(path) / "lmcache"))
    steps.next("done")
    return results


def _counts(requests: str | int | Sequence[int]) -> list[int]:
    parts = requests.split(",") if isinstance(requests, str) else requests
    counts = [int(part) for part in ([parts] if isinstance(parts, int) else parts)]
    if not counts or min(counts) < 1:
        raise ConfigError(f"requests must be numbers >= 1, got {requests!r}")
    return counts


class _Steps:
    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._done, self._total = progress, 0, total

    def next(self, name: str) -> None:
        self._progress(name, self._done, self._total)
        self._done += 1


def _host(setup: _Setup, cache: OpenCache, limit: CopyLimit, count: int) -> list[Result]:
    """Measure put and get of the host tier against plain copies of the same bytes."""
    name = iter(range(1, 1 << 30))
    texts = setup.split(count)

    def put() -> float:  # new prompts: what is there has to go
        sets = [setup.split(count, next(name)) for _ in range(_ROUNDS)]
        return setup.speed(cache.put(*sets, blocks=setup.sources)) * _ROUNDS

    most = min(count, max(1, setup.tokens // _LEAST_TOKENS))
    blocks = len(setup.sources)
    shared = setup.split(next(part for part in range(most, 0, -1) if blocks % part == 0))
    passes = _ROUNDS * count / len(shared)

    def get() -> float:
        cache.reset()
        cache.put(shared, blocks=setup.sources)
        seconds = cache.get(*[shared] * _ROUNDS, blocks=setup.targets, clients=count)
        return setup.speed(seconds) * passes

    _check_host(setup, cache, texts)
    actions: dict[str, Callable[[], float]] = {
        "put": put,
        "put_limit": lambda: limit.speed(to_device=False) / _GIGA,
        "host_get": get,
        "host_get_limit": lambda: limit.speed(to_device=True) / _GIGA,
    }
    samples = interleave(actions, setup.repeats)
    return [
        Result(
            name,
            median(samples[name]),
            "GB/s",
            limit=median(samples[f"{name}_limit"]),
            ratio=ratio_of_pairs(samples[name], samples[f"{name}_limit"]),
            samples=setup.repeats,
            params=setup.params(count)
            | {"limit": "non-temporal copy", "tokens_per_request": setup.tokens // prompts},
        )
        for name, prompts in (("host_get", len(shared)), ("put", count))
    ]


def _check_host(setup: _Setup, cache: OpenCache, texts: Sequence[Tokens]) -> None:
    """Fill the host tier with the prompts; make sure that the right bytes come back."""
    cache.reset()
    cache.device.fill()
    cache.put(texts, blocks=setup.sources)
    cache.device.wipe()
    cache.get(texts, blocks=setup.targets)
    cache.device.check(setup.sources, setup.targets)


@contextmanager
def _disk_cache(
    setup: _Setup, device: DeviceMemory, path: Path, memory: dict[str, Any]
) -> Iterator[OpenCache]:
    """Open a cache whose disk tier holds twice what its host tier can."""
    space = 2 * memory["host_cache_bytes"]
    with OpenCache.open(
        setup.spec, device, disk_cache_bytes=space, disk_dirs=[path / "tier"], **memory
    ) as cache:
        yield cache


class _Alternating:
    """Two sets of prompts, both on disk; the host holds one: getting the other is a disk read."""

    def __init__(self, setup: _Setup, cache: OpenCache, count: int) -> None:
        self._setup, self._cache, self._turn = setup, cache, 0
        self._texts = [setup.split(count, name) for name in (1, 2)]
        cache.reset()
        cache.device.fill()
        for texts in self._texts:
            cache.put(texts, blocks=setup.sources, durable=True)
        cache.device.wipe()
        self.get()
        cache.device.check(setup.sources, setup.targets)

    def get(self) -> float:
        """Get what is on disk only; return the seconds it took."""
        texts = self._texts[self._turn]
        self._turn ^= 1
        return self._cache.get(texts, blocks=self._setup.targets)


def _disk(setup: _Setup, cache: OpenCache, path: Path, count: int) -> Result:
    """Measure gets from the disk tier against fio reading as many bytes."""
    tier = _Alternating(setup, cache, count)
    depth = max(1, cache.config.disk_bytes_in_flight // setup.spec.stride_bytes)

    def fio() -> float:
        speed = disk_read_speed(path, setup.size_bytes, setup.spec.stride_bytes, depth)
        return (speed or 0.0) / _GIGA

    params = setup.params(count) | {"depth": depth}
    if not fio():
        speeds = [setup.speed(tier.get()) for _ in range(setup.repeats)]
        params["limit"] = "none: no fio, or no O_DIRECT"
        return Result("disk_get", median(speeds), "GB/s", samples=setup.repeats, params=params)
    samples = interleave({"disk_get": lambda: setup.speed(tier.get()), "fio": fio}, setup.repeats)
    return Result(
        "disk_get",
        median(samples["disk_get"]),
        "GB/s",
        limit=median(samples["fio"]),
        ratio=ratio_of_pairs(samples["disk_get"], samples["fio"]),
        samples=setup.repeats,
        params=params | {"limit": "fio, direct, io_uring"},
    )


def _against_lmcache(
    setup: _Setup, cache: OpenCache, name: str, python: str | None, directory: Path | None
) -> Result:
    """Measure one request of all tokens in turn with LMCache doing the same."""
    if directory is None:
        texts = setup.split(1)
        _check_host(setup, cache, texts)

        def get() -> float:
            return cache.get(texts, blocks=setup.targets)
    else:
        directory.mkdir()
        get = _Alternating(setup, cache, 1).get
    actions = {"ours": lambda: setup.speed(get())}
    params = setup.params(1)
    with ExitStack() as stack:
        try:
            if python is None:
                raise PeerError("no lmcache here: name an interpreter that has it: lmcache_python=")
            peer = stack.enter_context(
                Peer.open(python, setup.spec, setup.tokens, setup.threads, directory)
            )
        except PeerError as error:
            params["skipped"] = str(error)
        else:
            params |= {f"lmcache_{key}": value for key, value in peer.facts.items()}
            actions["theirs"] = lambda: setup.speed(peer.retrieve())
        samples = interleave(actions, setup.repeats)
    theirs = samples.get("theirs")
    return Result(
        f"{name}_vs_lmcache",
        median(samples["ours"]),
        "GB/s",
        peer=median(theirs) if theirs else None,
        ratio=ratio_of_pairs(samples["ours"], theirs) if theirs else None,
        samples=setup.repeats,
        params=params,
    )
