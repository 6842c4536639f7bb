"""What a manager's transfers are measured against: copies, the disk itself, another implementation.

`CopyLimit` (plain non-temporal copies of the same bytes) - `disk_read_speed` (fio, direct) -
`Peer` (LMCache in a process of its own) - `find_lmcache`.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv._core import ffi, lib
from flexkv.bench.cache import DeviceMemory
from flexkv.errors import FlexKVError
from flexkv.memory import Arena
from flexkv.model import KVSpec

Addresses = NDArray[np.uint64]

_KINDS = {"plain": 1, "pagewise": 2}  # of fx_copy_plain


class CopyLimit:
    """Copies the segments of all device blocks to or from host memory, with nothing around it.

    Two non-temporal loops, the plainest one and the page-wise one; the faster one is the limit.
    """

    def __init__(self, spec: KVSpec, device: DeviceMemory, threads: int) -> None:
        group = spec.groups[0]
        self._segment = spec.tokens_per_block * group.heads * group.head_size * 2
        self._threads = threads
        self._bytes = device.blocks * spec.block_bytes
        # as many slots as blocks: a smaller arena would stay in the last-level cache
        self._arena = Arena(device.blocks, spec.stride_bytes)
        self._workers = ThreadPoolExecutor(threads)
        blocks = np.random.default_rng(1).permutation(device.blocks).astype(np.uint64)
        starts = [
            np.uint64(part.__array_interface__["data"][0])
            for cache in device.caches.values()
            for part in cache
        ]
        # block by block, as the copy engine goes
        self._device = (
            np.array(starts, np.uint64)[None, :] + blocks[:, None] * np.uint64(self._segment)
        ).ravel()
        host = np.arange(device.blocks, dtype=np.uint64)
        places = np.arange(len(starts), dtype=np.uint64) * np.uint64(self._segment)
        base = np.uint64(self._arena.base)
        self._host = (base + host[:, None] * np.uint64(spec.stride_bytes) + places).ravel()

    def close(self) -> None:
        """Give memory and threads back."""
        self._workers.shutdown()
        self._arena.close()

    def speed(self, *, to_device: bool) -> float:
        """Copy everything by each loop; return bytes per second of the faster one."""
        return max(self._copy(kind, to_device) for kind in _KINDS.values())

    def _copy(self, kind: int, to_device: bool) -> float:
        source, target = (self._host, self._device)[:: 1 if to_device else -1]
        cuts = np.linspace(0, len(source), self._threads + 1, dtype=np.int64)

        def part(begin: int, end: int) -> None:
            self.copy(source[begin:end], target[begin:end], kind)

        start = time.perf_counter()
        list(self._workers.map(part, cuts[:-1].tolist(), cuts[1:].tolist()))
        return self._bytes / (time.perf_counter() - start)

    def copy(self, source: Addresses, target: Addresses, kind: int) -> None:
        """Copy segments between addresses, in this thread."""
        lib.fx_copy_plain(
            ffi.from_buffer("uint64_t[]", source.data),
            ffi.from_buffer("uint64_t[]", target.data),
            self._segment,
            len(source),
            kind,
        )


def copy_block_seconds(spec: KVSpec, device: DeviceMemory, samples: int) -> list[float]:
    """Return the seconds that one block takes to copy to the device, alone, in this thread."""
    one = CopyLimit(spec, device, 1)
    try:
        per_block = len(one._device) // device.blocks
        times = []
        for i in range(samples):
            part = slice(i % device.blocks * per_block, (i % device.blocks + 1) * per_block)
            source, target = one._host[part], one._device[part]
            start = time.perf_counter()
            one.copy(source, target, _KINDS["pagewise"])
            times.append(time.perf_counter() - start)
        return times
    finally:
        one.close()


def disk_read_speed(
    directory: Path, size_bytes: int, block_bytes: int, depth: int, *, shuffled: bool = False
) -> float | None:
    """Return bytes per second of fio reading a file of `size_bytes` past the page cache, from its
    beginning to its end or `shuffled`.

    The file stays for the next call. None without fio, or where the file system has no O_DIRECT.
    """
    if shutil.which("fio") is None:
        return None
    command = [
        *("fio", "--name=limit", f"--filename={directory / 'fio.bin'}", "--direct=1"),
        f"--rw={'randread' if shuffled else 'read'}",
        *("--ioengine=io_uring", f"--size={size_bytes}", f"--bs={block_bytes}"),
        *(f"--iodepth={depth}", "--output-format=json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        return None
    text = done.stdout[done.stdout.index("{") :]
    return float(json.loads(text)["jobs"][0]["read"]["bw_bytes"])


def find_lmcache(python: str | Path | None) -> str | None:
    """Return an interpreter that has lmcache: the given one, or this one; None if it has not."""
    if python:
        return str(python)
    return sys.executable if importlib.util.find_spec("lmcache") else None


class PeerError(FlexKVError):
    """The peer cannot be measured."""


class Peer:
    """LMCache in a process of its own, holding one prompt; see `peer_lmcache`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.facts: dict[str, Any] = {}

    @classmethod
    @contextmanager
    def open(
        cls, python: str, spec: KVSpec, tokens: int, threads: int, directory: Path | None
    ) -> Iterator[Peer]:
        """Start it, store a prompt in memory or in `directory`, check that it comes back whole.

        Raises:
            PeerError: the interpreter cannot be started, has no lmcache, or that failed.
        """
        group = spec.groups[0]
        shape = {
            "layers": spec.layers,
            "heads": group.heads,
            "head_size": group.head_size,
            "tokens_per_block": spec.tokens_per_block,
        }
        place = "" if directory is None else str(directory.resolve())
        script = Path(__file__).with_name("peer_lmcache.py")
        try:
            started = subprocess.Popen(
                [python, "-I", str(script)],  # -I: its neighbours here are no modules of its own
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                bufsize=1,
            )
        except OSError as error:
            raise PeerError(f"{python} cannot be started: {error}") from error
        with started as process:
            peer = cls(process)
            try:
                order = {"tokens": tokens, "threads": threads, "dir": place, "shape": shape}
                peer.facts = peer._ask("open", **order)
                yield peer
            finally:
                process.kill()

    def retrieve(self) -> float:
        """Return the seconds it took to bring the whole prompt back to its slots."""
        return float(self._ask("retrieve")["seconds"])

    def _ask(self, verb: str, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": verb, **order}) + "\n")
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it ended"}
        if "error" in answer:
            raise PeerError(f"LMCache could not {verb}: {answer['error']}")
        return answer
