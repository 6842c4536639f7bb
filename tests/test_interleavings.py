"""The whole manager under random interleavings of everything, on small tiers: every block that is
loaded is right, nothing lands where it must not, and the books balance at the end. A failing seed
is printed with the failure.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loop_matrix import LOOPS, run_on
from rig import TOKENS_PER_BLOCK, Rig, pattern, slots_of
from stepping import open_stepping

from flexkv import CapacityError, GetResult, TransferError
from flexkv.transfer import Plan, Transfer

REGION = 6  # device blocks of one operation: the longest prompt
REGIONS = 40
NAMESPACES = [None, ("tenant-7",)]


class Chaos:
    """Starts random work on a rig; checks every result as it comes."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig, self.chance = rig, random.Random(seed)
        self.free_regions = list(range(REGIONS))
        self.tasks: set[asyncio.Task[None]] = set()
        self.plans: list[tuple[Plan, list[int], Any]] = []
        self.transfers: list[Transfer] = []
        self.counts: dict[str, int] = {}

    def tokens(self) -> list[int]:
        """A prompt of 1 to 6 blocks out of a small tree."""
        branches = [self.chance.randint(0, 2) for _ in range(self.chance.randint(1, REGION))]
        return [branch * 100 + i for branch in branches for i in range(TOKENS_PER_BLOCK)]

    def spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)

    def put(self) -> None:
        if not self.free_regions:
            return
        tokens, namespace = self.tokens(), self.chance.choice(NAMESPACES)
        region = self.free_regions.pop()
        transfer = self.rig.start_put(tokens, namespace, first=region * REGION)
        self.transfers.append(transfer)
        self.spawn(self._follow_put(transfer, region, self.chance.random() < 0.3))

    async def _follow_put(self, transfer: Transfer, region: int, durable: bool) -> None:
        try:
            result = await (transfer.durable() if durable else transfer)
            assert result.cancelled or result.stored <= transfer.matched
        except (CapacityError, TransferError):
            self.counts["refused"] = self.counts.get("refused", 0) + 1
        await transfer.quiesced()
        self._give_back(region)

    def get(self) -> None:
        if self.free_regions:
            tokens, namespace = self.tokens(), self.chance.choice(NAMESPACES)
            self.launch(self.rig.kv.get_match(tokens, namespace=namespace), tokens, namespace)

    def launch(self, plan: Plan, tokens: list[int], namespace: Any) -> None:
        region = self.free_regions.pop()
        first = region * REGION
        for block in range(first, first + REGION):
            self.rig.device.write_sentinel(block)
        transfer = self.rig.kv.launch(plan, slots_of(range(first, first + REGION)))
        self.transfers.append(transfer)
        self.spawn(self._follow_get(transfer, tokens, namespace, region))

    async def _follow_get(
        self, transfer: Transfer, tokens: list[int], namespace: Any, region: int
    ) -> None:
        result: GetResult = await transfer
        await transfer.quiesced()
        first = region * REGION
        failed = set(result.failed_device_blocks.tolist())
        for i in range(transfer.matched // TOKENS_PER_BLOCK):
            if first + i not in failed:
                right = pattern(tokens, i, namespace)
                assert (self.rig.device.read(first + i) == right).all(), "wrong bytes"
        assert not failed & set(range(first, first + result.loaded // TOKENS_PER_BLOCK))
        for block in range(first + transfer.matched // TOKENS_PER_BLOCK, first + REGION):
            assert self.rig.device.holds_sentinel(block), "an unrelated block was written"
        self.counts["loaded"] = self.counts.get("loaded", 0) + result.loaded
        self._give_back(region)

    def _give_back(self, region: int) -> None:
        """Reuse the blocks at once: whatever landed later would spoil somebody else."""
        self.free_regions.append(region)

    def match(self) -> None:
        if len(self.plans) < 3:
            tokens, namespace = self.tokens(), self.chance.choice(NAMESPACES)
            plan = self.rig.kv.get_match(tokens, namespace=namespace)
            self.plans.append((plan, tokens, namespace))

    def settle_plan(self) -> None:
        if self.plans:
            plan, tokens, namespace = self.plans.pop(self.chance.randrange(len(self.plans)))
            if plan.open and self.free_regions and self.chance.random() < 0.6:
                self.launch(plan, tokens, namespace)
            else:
                plan.cancel()

    def put_plan(self) -> None:
        try:
            plan = self.rig.kv.put_match(self.tokens())
        except CapacityError:
            return
        plan.cancel()

    def prefetch(self) -> None:
        self.transfers.append(self.rig.kv.prefetch_async(self.tokens()))

    def cancel(self) -> None:
        running = [transfer for transfer in self.transfers if not transfer.done]
        if running:
            self.chance.choice(running).cancel()

    def remove(self) -> None:
        self.rig.kv.remove(self.tokens(), namespace=self.chance.choice(NAMESPACES))

    async def run(self, operations: int) -> None:
        verbs: list[tuple[Callable[[], None], int]] = [
            (self.put, 10),
            (self.get, 12),
            (self.match, 3),
            (self.settle_plan, 4),
            (self.put_plan, 2),
            (self.prefetch, 4),
            (self.cancel, 4),
            (self.remove, 2),
        ]
        for number in range(operations):
            self.chance.choices([verb for verb, _ in verbs], [weight for _, weight in verbs])[0]()
            for _ in range(self.chance.choice([0, 0, 1, 3, 10])):
                await turn()
            if number % 100 == 99:
                await (self.rig.kv.reset() if self.chance.random() < 0.5 else self.rig.kv.flush())
            for task in [task for task in self.tasks if task.done()]:
                self.tasks.discard(task)
                task.result()
        for plan, _, _ in self.plans:
            plan.cancel()
        await asyncio.gather(*self.tasks)
        assert len(self.free_regions) == REGIONS


async def turn() -> None:
    """Let the loop turn once."""
    turned = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(turned.set_result, None)
    await turned


SETTINGS = [
    {"spill": "through"},
    {"spill": "on_evict"},
    {"spill": "through", "evict_ratio": 0.2, "evict_start_threshold": 0.7, "disk": 12},
    {"spill": "on_evict", "eviction_policy": "slru", "disk": 10, "host": 12},
    {"spill": "through", "eviction_policy": "lfu", "inline_copy_bytes": 1 << 20, "host": 6},
    {"spill": "never", "eviction_policy": "fifo"},
]


@pytest.mark.parametrize("seed", range(12))
def test_random_interleavings_serve_nothing_wrong(tmp_path: Path, seed: int) -> None:
    loop, settings = LOOPS[seed % len(LOOPS)], SETTINGS[seed % len(SETTINGS)]

    async def main() -> None:
        async with open_stepping(tmp_path, device=REGIONS * REGION, **settings) as (rig, _):
            chaos = Chaos(rig, seed)
            await chaos.run(300)
            assert chaos.counts.get("loaded", 0) > 0

    run_on(loop, main())
