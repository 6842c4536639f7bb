"""LMCache's local backends on the same KV as `flexkv bench e2e`, in a process of their own.

Run by an interpreter that has lmcache: reads one JSON object a line from stdin ("open", "retrieve",
"close") and answers each with one line on stdout. Imports nothing of flexkv. How the engine is
opened: lmcache 0.5.6.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

CHUNK_TOKENS = 256  # LMCache's own default
VISIBLE_TIMEOUT_S = 120.0


class Connector:
    """Copies between paged KV in host memory and LMCache's chunks, [2, layers, tokens, hidden].

    LMCache brings none for CPU tensors. One `index_select` or `index_copy_` per layer and part: the
    same way its own torch fallback goes, in fewer calls.
    """

    def __init__(self, torch: Any, shape: dict[str, int]) -> None:
        self._torch = torch
        self._layers, self._block = shape["layers"], shape["tokens_per_block"]
        self._hidden = shape["heads"] * shape["head_size"]

    def get_shape(self, tokens: int) -> Any:
        """Return the shape of a chunk."""
        return self._torch.Size([2, self._layers, tokens, self._hidden])

    def _pairs(self, chunk: Any, start: int, end: int, given: dict[str, Any]) -> Any:
        """The block numbers, and per layer and part (device blocks, chunk blocks) as matrices."""
        ids = given["slot_mapping"][start : end : self._block] // self._block
        width = self._block * self._hidden
        views = [
            (cache[part].view(-1, width), chunk.tensor[part, layer].view(-1, width))
            for layer, cache in enumerate(given["kvcaches"])
            for part in range(2)
        ]
        return ids, views

    def from_gpu(self, chunk: Any, start: int, end: int, **given: Any) -> None:
        """Gather the tokens [start, end) into a chunk."""
        ids, views = self._pairs(chunk, start, end, given)
        for device, host in views:
            self._torch.index_select(device, 0, ids, out=host)

    def to_gpu(self, chunk: Any, start: int, end: int, **given: Any) -> None:
        """Scatter a chunk to the tokens [start, end)."""
        ids, views = self._pairs(chunk, start, end, given)
        for device, host in views:
            device.index_copy_(0, ids, host)

    def batched_from_gpu(
        self, chunks: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **given: Any
    ) -> None:
        """Gather several chunks."""
        for chunk, start, end in zip(chunks, starts, ends, strict=True):
            self.from_gpu(chunk, start, end, **given)

    def batched_to_gpu(
        self, chunks: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **given: Any
    ) -> None:
        """Scatter several chunks."""
        for chunk, start, end in zip(chunks, starts, ends, strict=True):
            self.to_gpu(chunk, start, end, **given)


class Peer:
    """One LMCache engine holding one prompt of `tokens` tokens, in memory or on disk."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._torch = torch = import_module("torch")
        shape = order["shape"]
        self._tokens: int = order["tokens"]
        block = shape["tokens_per_block"]
        blocks = self._tokens // block
        size = (2, blocks, block, shape["heads"], shape["head_size"])
        self._kv = [torch.empty(size, dtype=torch.bfloat16) for _ in range(shape["layers"])]
        places = torch.randperm(blocks)[:, None] * block + torch.arange(block)[None]
        self._given = {"kvcaches": self._kv, "slot_mapping": places.reshape(-1)}
        self._prompt = torch.arange(self._tokens)
        self._engine = self._open(order, shape)

    def _open(self, order: dict[str, Any], shape: dict[str, int]) -> Any:
        config = import_module("lmcache.v1.config").LMCacheEngineConfig
        metadata = import_module("lmcache.v1.metadata").LMCacheMetadata
        builder = import_module("lmcache.v1.cache_engine").LMCacheEngineBuilder
        interface = import_module("lmcache.v1.gpu_connector").GPUConnectorInterface
        kind = type("CpuConnector", (Connector, interface), {})
        layers, heads, head_size = shape["layers"], shape["heads"], shape["head_size"]
        prompt_gib = self._tokens * layers * 2 * heads * head_size * 2 / 2**30
        settings: dict[str, Any] = {
            "chunk_size": CHUNK_TOKENS,
            "local_cpu": not order["dir"],
            "max_local_cpu_size": prompt_gib * 1.25 + 0.25,
        }
        if order["dir"]:
            settings |= {
                "local_disk": f"file://{order['dir']}/",
                "max_local_disk_size": prompt_gib * 2 + 0.25,
                "extra_config": {"use_odirect": True},
            }
        engine = builder.get_or_create(
            "flexkv-bench",
            config.from_defaults(**settings),
            metadata(
                model_name="bench",
                world_size=1,
                local_world_size=1,
                worker_id=0,
                local_worker_id=0,
                kv_dtype=self._torch.bfloat16,
                kv_shape=(layers, 2, CHUNK_TOKENS, heads, head_size),
                use_mla=False,
                chunk_size=CHUNK_TOKENS,
            ),
            kind(self._torch, shape),
            lambda tensor, source: None,
            lambda item, source: item,
        )
        engine.post_init()
        return engine

    def store(self) -> None:
        """Store the prompt, wait until a lookup finds all of it, and check what comes back."""
        for layer, cache in enumerate(self._kv):
            cache.view(self._torch.int16).copy_(self._content(layer))
        self._engine.store(self._prompt, **self._given)
        pause, deadline = threading.Event(), time.monotonic() + VISIBLE_TIMEOUT_S
        while (found := self._engine.lookup(self._prompt)) < self._tokens:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{found} of {self._tokens} tokens became visible in time")
            pause.wait(0.01)
        for cache in self._kv:
            cache.zero_()
        self.retrieve()
        for layer, cache in enumerate(self._kv):
            if not self._torch.equal(cache.view(self._torch.int16), self._content(layer)):
                raise RuntimeError(f"layer {layer} came back with other bytes")

    def _content(self, layer: int) -> Any:
        shape, integers = self._kv[layer].shape, self._torch.int16
        random = self._torch.Generator().manual_seed(layer)
        return self._torch.randint(-(2**15), 2**15, shape, dtype=integers, generator=random)

    def retrieve(self) -> float:
        """Bring the whole prompt back to its slots; return the seconds it took."""
        start = time.perf_counter()
        mask = self._engine.retrieve(self._prompt, **self._given)
        elapsed = time.perf_counter() - start
        loaded = int(mask.sum())
        if loaded != self._tokens:
            raise RuntimeError(f"{loaded} of {self._tokens} tokens were retrieved")
        return elapsed

    def tune(self, threads: int) -> int:
        """Use as many threads, up to `threads`, as retrieve fastest here; return how many."""
        times = {}
        for count in range(1, threads + 1):
            self._torch.set_num_threads(count)
            times[count] = min(self.retrieve() for _ in range(3))
        best = min(times, key=lambda count: times[count])
        self._torch.set_num_threads(best)
        return best


def main() -> None:
    """Serve orders until "close" or the end of stdin."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not get between the answers
    os.environ |= {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
    # Threads that spin at the end of a parallel loop lose whole time slices on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    peer: Peer | None = None
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if order["do"] == "close":
                break
            if order["do"] == "open":
                peer = Peer(order)
                peer.store()
                answer["threads"] = peer.tune(order["threads"])
                answer["version"] = import_module("importlib.metadata").version("lmcache")
            else:
                assert peer is not None, "open first"
                answer["seconds"] = peer.retrieve()
        except Exception as error:
            answer["error"] = repr(error)
        answers.write(json.dumps(answer) + "\n")
    answers.flush()
    os._exit(0)  # LMCache's threads do not end by themselves


if __name__ == "__main__":
    main()
