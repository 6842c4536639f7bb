"""A whole manager to measure, driven from outside its event loop.

`DeviceMemory` (an engine's KV tensors whose bytes tell where they came from: `fill`, `wipe`,
`check`) - `OpenCache` (a manager in a loop of its own: `put`, `get`, `one`, `launch`, `at_once`,
`from_tier`, `latencies`, `usage`, `reset`) - `prompts` (tokens that share nothing).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import anyio
import numpy as np
from anyio.from_thread import BlockingPortal, start_blocking_portal
from numpy.typing import NDArray

from flexkv import FlexKVConfig, KVManager
from flexkv.errors import TransferError
from flexkv.model import PAGE_BYTES, KVSpec
from flexkv.transfer import GetResult, Transfer

LLAMA = KVSpec.uniform(layers=32, heads=8, head_size=128, dtype="bfloat16", tokens_per_block=16)

Tokens = NDArray[np.int64]
Verb = Callable[[Any, Any], Transfer]
Blocks = NDArray[np.int64]  # device blocks


def prompts(count: int, tokens: int, name: int = 0) -> list[Tokens]:
    """Return `count` prompts of `tokens` tokens; other names give other prompts."""
    start = name * count * tokens
    return [np.arange(tokens, dtype=np.int64) + start + i * tokens for i in range(count)]


def _aligned(shape: Sequence[int]) -> NDArray[np.uint16]:
    """Make an array on a page boundary, as engines have it."""
    size = int(np.prod(shape))
    raw = np.zeros(size + PAGE_BYTES // 2, np.uint16)
    skip = -int(raw.__array_interface__["data"][0]) % PAGE_BYTES // 2
    return raw[skip : skip + size].reshape(shape)


class DeviceMemory:
    """One array [part, block, token, head, element] of 16-bit words per layer.

    Every segment (layer, part, block) is the same noise, changed by a number of its own.
    """

    def __init__(self, spec: KVSpec, blocks: int) -> None:
        group = spec.groups[0]
        self.blocks, self.tokens_per_block = blocks, spec.tokens_per_block
        self._words = spec.tokens_per_block * group.heads * group.head_size
        shape = (group.parts, blocks, spec.tokens_per_block, group.heads, group.head_size)
        self.caches = {f"layer.{i}": _aligned(shape) for i in range(spec.layers)}
        self._noise = np.random.default_rng(0).integers(0, 2**16, self._words, np.uint16)

    def _segments(self) -> Iterator[tuple[int, NDArray[np.uint16]]]:
        """Yield (number of the first segment, [block, word]) per layer and part."""
        number = 0
        for cache in self.caches.values():
            for part in cache:
                yield number, part.reshape(self.blocks, self._words)
                number += self.blocks

    def _numbers(self, first: int, blocks: Blocks) -> NDArray[np.uint16]:
        return ((first + blocks) * 40503 + 1).astype(np.uint16)[:, None]

    def fill(self) -> None:
        """Write every block's own bytes."""
        everything = np.arange(self.blocks)
        for first, segments in self._segments():
            np.bitwise_xor(self._noise, self._numbers(first, everything), out=segments)

    def wipe(self) -> None:
        """Forget everything."""
        for cache in self.caches.values():
            cache[:] = 0

    def check(self, sources: Blocks, targets: Blocks) -> None:
        """Make sure that the blocks `targets` hold what was filled into the blocks `sources`.

        Raises:
            TransferError: one does not.
        """
        for first, segments in self._segments():
            expected = self._noise ^ self._numbers(first, sources)
            wrong = (segments[targets] != expected).any(axis=1)
            if wrong.any():
                raise TransferError(f"block {targets[wrong][0]} came back with other bytes")


class OpenCache:
    """A manager and its device memory; every verb runs on the manager's loop and waits for it."""

    def __init__(self, portal: BlockingPortal, kv: KVManager, device: DeviceMemory) -> None:
        self._portal, self._kv, self.device = portal, kv, device
        self._tokens_per_block = device.tokens_per_block

    @classmethod
    @contextmanager
    def open(
        cls, spec: KVSpec, device: DeviceMemory, /, *, uvloop: bool = False, **settings: Any
    ) -> Iterator[OpenCache]:
        """Open a manager with `settings` in a thread of its own."""
        config = FlexKVConfig.load(spec=spec, model="bench", **settings)
        options = {"use_uvloop": uvloop}
        with (
            start_blocking_portal(backend_options=options) as portal,
            portal.wrap_async_context_manager(KVManager(config)) as kv,
        ):
            portal.call(partial(kv.register, device.caches, axes="PBNHD"))
            yield cls(portal, kv, device)

    def slots(self, blocks: Blocks) -> Tokens:
        """Return the slots of the tokens in device blocks."""
        size = self._tokens_per_block
        return (blocks[:, None] * size + np.arange(size)).reshape(-1)

    def put(self, *sets: Sequence[Tokens], blocks: Blocks, durable: bool = False) -> float:
        """Put prompts from device blocks; return the seconds until all are stored.

        Each set has a prompt per client; a client puts its prompt of one set after the other, from
        its share of `blocks`. `durable` waits, off the clock, until the lowest tier has them.
        """
        verb: Verb = self._kv.put_async
        elapsed, transfers = self._portal.call(self._clients, verb, sets, blocks)
        if durable:
            self._portal.call(_all_durable, transfers)
        return elapsed

    def get(self, *sets: Sequence[Tokens], blocks: Blocks, clients: int = 0) -> float:
        """Get prompts into device blocks, by clients as in `put`; return the seconds it took.

        More `clients` than prompts share them, and the device blocks: the bytes are the same.

        Raises:
            TransferError: some of their tokens were not loaded.
        """
        verb: Verb = self._kv.get_async
        elapsed, transfers = self._portal.call(self._clients, verb, sets, blocks, clients)
        loaded = sum(transfer.result().loaded for transfer in transfers)
        wanted = sum(len(texts[0]) for texts in sets) * len(transfers) // len(sets)
        if loaded != wanted:
            raise TransferError(f"{wanted - loaded} tokens that were stored were not loaded")
        return elapsed

    async def _clients(
        self, verb: Verb, sets: Sequence[Sequence[Tokens]], blocks: Blocks, clients: int = 0
    ) -> tuple[float, list[Transfer]]:
        """Run the clients; return the seconds from when they may begin, and their transfers."""
        transfers, begin = [], anyio.Event()
        shares = np.array_split(blocks, len(sets[0]))

        async def client(texts: Sequence[Tokens], slots: Tokens) -> None:
            await begin.wait()
            for text in texts:
                transfer = verb(text, slots)
                await transfer
                transfers.append(transfer)

        async with anyio.create_task_group() as group:
            for number in range(clients or len(shares)):
                number %= len(shares)
                texts = [texts[number] for texts in sets]
                group.start_soon(client, texts, self.slots(shares[number]))
            await anyio.wait_all_tasks_blocked()
            start = time.perf_counter()
            begin.set()
        return time.perf_counter() - start, transfers

    def one(self, tokens: Tokens, blocks: Blocks | None) -> GetResult:
        """Get one prompt into device blocks; with None, bring it to the host only."""

        async def work() -> GetResult:
            if blocks is None:
                transfer = self._kv.prefetch_async(tokens)
            else:
                transfer = self._kv.get_async(tokens, self.slots(blocks))
            result: GetResult = await transfer
            return result

        return self._portal.call(work)

    def launch(self, tokens: Tokens, blocks: Blocks, tag: Any) -> Callable[[], GetResult]:
        """Begin to get a prompt, first layers first; `tag` reaches the device with every copy.

        Returns what waits for the end.
        """

        async def start() -> Transfer:
            plan = self._kv.get_match(tokens)
            plan.tag = tag
            return self._kv.launch(plan, self.slots(blocks), layerwise=True)

        transfer = self._portal.call(start)

        async def end() -> GetResult:
            result: GetResult = await transfer
            return result

        return partial(self._portal.call, end)

    def at_once(self, texts: Sequence[Tokens], shares: Sequence[Blocks]) -> list[float]:
        """Get prompts, each into its share of device blocks, all begun at once; return the seconds
        from the beginning to the end of each.

        Raises:
            TransferError: some of their tokens were not loaded.
        """
        transfers = self._at_once(texts, shares)
        begun = min(transfer.started for transfer in transfers)
        return [transfer.finished - begun for transfer in transfers]

    def from_tier(self, tier: str, texts: Sequence[Tokens], shares: Sequence[Blocks]) -> float:
        """Get prompts as `at_once` does; return the seconds until all have ended.

        Raises:
            TransferError: some of their tokens were not loaded, or not from this tier.
        """
        transfers = self._at_once(texts, shares)
        for text, transfer in zip(texts, transfers, strict=True):
            got = transfer.result()
            if got.loaded != len(text) or got.by_tier.get(tier, 0) * self._tokens_per_block != (
                got.loaded
            ):
                raise TransferError(f"{got.loaded} of {len(text)} tokens came from {got.by_tier}")
        begun = min(transfer.started for transfer in transfers)
        return max(transfer.finished for transfer in transfers) - begun

    def _at_once(self, texts: Sequence[Tokens], shares: Sequence[Blocks]) -> list[Transfer]:
        slots = [self.slots(share) for share in shares]

        async def work() -> list[Transfer]:
            transfers = [
                self._kv.get_async(text, where) for text, where in zip(texts, slots, strict=True)
            ]
            return await self._kv.wait(transfers)

        transfers = self._portal.call(work)
        if any(transfer.result().loaded != transfer.matched for transfer in transfers):
            raise TransferError("tokens that were stored were not loaded")
        return transfers

    @property
    def config(self) -> FlexKVConfig:
        """The manager's settings."""
        return self._kv.config

    def usage(self) -> dict[str, dict[str, int]]:
        """Return blocks per tier; see KVManager.usage."""
        return self._portal.call(self._kv.usage)

    def latencies(self, texts: Sequence[Tokens], samples: int) -> list[float]:
        """Get one prompt after the other into the first device blocks; return seconds of each."""
        slots = self.slots(np.arange(len(texts[0]) // self._tokens_per_block))

        async def work() -> list[float]:
            times = []
            for i in range(samples):
                tokens = texts[i % len(texts)]
                start = time.perf_counter()
                await self._kv.get_async(tokens, slots)
                times.append(time.perf_counter() - start)
            return times

        return self._portal.call(work)

    def time_plans(self, tokens: Tokens, samples: int) -> dict[str, list[float]]:
        """Plan gets of a prompt without running them; return seconds of `match` and `launch`.

        `match` is `get_match` with hashing, `launch` the call that returns a running Transfer.
        """
        slots = self.slots(np.arange(len(tokens) // self._tokens_per_block))

        async def work() -> dict[str, list[float]]:
            times: dict[str, list[float]] = {"match": [], "launch": []}
            for _ in range(samples):
                start = time.perf_counter()
                plan = self._kv.get_match(tokens)
                matched = time.perf_counter()
                transfer = self._kv.launch(plan, slots)
                launched = time.perf_counter()
                transfer.cancel()
                await transfer.quiesced()
                times["match"].append(matched - start)
                times["launch"].append(launched - matched)
            return times

        return self._portal.call(work)

    def reset(self) -> None:
        """Forget every block of every tier."""
        self._portal.call(self._kv.reset)


async def _all_durable(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        await transfer.durable()
