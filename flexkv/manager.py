"""KVManager: the public face. It owns brain and body, and every transfer.

`register` - `get_match`, `put_match`, `launch` - `get_async`, `put_async` - `wait`, `flush`,
`remove`, `reset` - `events`, `usage`, `computed`; `prefetch_async` and `retain` come from
`flexkv.ahead`. Plain calls start work at once; awaiting a Transfer is only listening. Lifetime and
the hosted task group are in `flexkv.hosting`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from flexkv.ahead import Ahead, Groups, Namespace
from flexkv.config import FlexKVConfig
from flexkv.errors import BrokenManagerError, CapacityError, ClosedError, InputError
from flexkv.events import EventStream
from flexkv.groups import WHOLE
from flexkv.keys import as_tokens
from flexkv.layerwise import cut_by_layers
from flexkv.model import SlotIds
from flexkv.protocols import Region
from flexkv.request import device_blocks
from flexkv.telemetry import log
from flexkv.transfer import Kind, Plan, Transfer, refused

Held = Sequence[Any] | None


class KVManager(Ahead):
    """Keeps KV blocks in host memory and on disk, and brings matched prefixes back into the
    engine's slots.

    Use it as `async with KVManager(config) as kv`. All calls belong to the event loop that entered
    it; from other threads use `flexkv.sync.BlockingKVManager`. Tokens and slot mappings may be
    lists, arrays, numpy or torch tensors of int32 or int64; `slot_mapping[i]` is the device slot of
    token i, whole blocks of consecutive slots.

    Raises (every call): ClosedError before entering and after leaving, BrokenManagerError after an
    internal crash, InputError for arguments that cannot be used.
    """

    def __init__(self, config: FlexKVConfig | None = None, **overrides: Any) -> None:
        super().__init__(FlexKVConfig.load(**overrides) if config is None else config)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise ClosedError("a KVManager is entered once; make another one")
        # a context of its own: what the manager logs must not carry the first caller's request
        self._task = asyncio.create_task(
            self._host.serve(), name="flexkv-host", context=contextvars.Context()
        )
        await self._host.entered()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.aclose()
        except BrokenManagerError:
            if error is None:
                raise

    async def aclose(self) -> None:
        """Let transfers and spills finish (up to close_timeout_ms), then release everything.

        Raises:
            BrokenManagerError: the manager had crashed; the cause is chained.
        """
        self._host.stop()
        if self._task is not None:
            await self._host.closed.wait()
        self._host.check()

    @property
    def failure(self) -> BaseException | None:
        """What broke the manager; None while it is well. May be read by any thread."""
        return self._host.failure

    # the device

    def register(self, kv_caches: Any, *, axes: str | None = None) -> Region:
        """Describe the engine's KV memory to flexkv; from now on slot mappings refer to it.

        Args:
            kv_caches: {layer name: tensor} in layer order, a list of tensors, one tensor, or a
            Region.
            axes: letters naming the tensors' dimensions (L layer, B block, P part, N token, H head,
                D element, C = P and D fused, T = B and N fused); read from the shape where that
                leaves no doubt.

        Raises:
            LayoutError: the tensors do not match the configured KVSpec, or the shape is ambiguous.
        """
        stack = self._stack
        self._region = stack.device.make_region(kv_caches, stack.spec, axes)
        log.info("region.registered", blocks=self._region.blocks, planes=len(self._region.planes))
        return self._region

    # matching

    def get_match(
        self,
        tokens: Any,
        *,
        namespace: Namespace = None,
        computed_tokens: int = 0,
        leave_tokens: int = 0,
        groups: Groups = WHOLE,
        kind: Kind = "get",
        weigh: bool = True,
    ) -> Plan:
        """Find the longest readable prefix, pinned until the plan is launched, cancelled or old.

        Args:
            computed_tokens: tokens the engine holds already (whole blocks); the plan starts behind
            them.
            leave_tokens: trailing tokens that must stay to be computed (engines need at least 1).
            groups: of a hybrid model: the prefix is what all of them can give.
            kind: what for; only a "get" counts as a request of the engine.
            weigh: with `fetch_or_recompute`, leave out the end that is computed sooner.

        Returns:
            A Plan; `plan.matched` tokens, from `plan.offset` on, can be loaded.
        """
        stack = self._stack
        tokens = as_tokens(tokens)
        size = stack.spec.tokens_per_block
        if computed_tokens < 0 or computed_tokens % size or leave_tokens < 0:
            raise InputError(
                f"computed_tokens ({computed_tokens}) must be whole blocks of {size}, leave_tokens "
                f"({leave_tokens}) must not be negative"
            )
        usable = 0 if self._host.resetting else max(0, len(tokens) - leave_tokens)
        self.telemetry.add("queried_blocks", usable // size)
        parts = self._keys(tokens, namespace, groups, kind, usable)
        weighed = weigh and kind == "get"
        return self._host.think(
            stack.plans.read, parts, computed_tokens // size, kind, weighed=weighed
        )

    def computed(
        self, tokens: int, elapsed_ms: float, *, past_tokens: int = 0, share: float = 1.0
    ) -> None:
        """Tell how long the engine took to prefill `tokens` behind `past_tokens` that were there.

        `fetch_or_recompute` learns from it what computing costs and how busy accelerators are;
        without that it is ignored.

        Args:
            tokens: 0 for other work, of which only the time counts.
            share: of the engine's accelerators, with which it was done.
        """
        stack = self._stack
        if min(tokens, past_tokens, elapsed_ms, share) < 0:
            raise InputError(
                f"tokens ({tokens}), past_tokens ({past_tokens}), elapsed_ms ({elapsed_ms}) and "
                f"share ({share}) must not be negative"
            )
        if stack.worth is not None:
            now = stack.completions.now()
            stack.worth.computed(tokens, past_tokens, elapsed_ms / 1e3, now, share)

    def put_match(
        self,
        tokens: Any,
        *,
        namespace: Namespace = None,
        groups: Groups = WHOLE,
        held: Held = None,
        output_tokens: int | None = None,
    ) -> Plan:
        """Take host slots for blocks of a prompt that are not there yet; launch it to fill them.

        `plan.matched` counts all whole-block tokens of the prompt; `launch` wants the slots of all
        of them.

        Args:
            groups, held: of a hybrid model; for each group the numbers of the blocks that there
            are, ascending, or None for all of them (as a group without a window must have).
            output_tokens: length of the answer, once it is known; `hazard` learns from it.

        Raises:
            CapacityError: the host cannot take them all now; nothing was changed.
        """
        stack = self._stack
        if output_tokens is not None and output_tokens < 0:
            raise InputError(f"output_tokens ({output_tokens}) must not be negative")
        if self._host.resetting:
            raise CapacityError("the cache is being reset; put again when reset() has returned")
        parts = self._keys(as_tokens(tokens), namespace, groups, "put")
        now = stack.completions.now()
        plan = self._host.think(stack.plans.take, parts, held, now, output_tokens)
        assert plan.put is not None
        if plan.put.saves is not None:
            self._host.save(plan.put.saves)
        return plan

    # transfers

    def launch(self, plan: Plan, slot_mapping: Any, *, layerwise: bool = False) -> Transfer:
        """Start a plan.

        Args:
            slot_mapping: device slots of `plan.matched` tokens or more, from `plan.offset` on; of
                several groups: of `plan.parts`, one behind the other.
            layerwise: bring the first layers of all blocks first.

        Raises:
            InputError: the plan is not open any more, or the mapping does not fit.
        """
        stack = self._stack
        if not plan.open and len(plan.blocks):
            raise InputError(f"{plan!r} was launched, cancelled or has expired; match again")
        device_blocks = self._device_blocks(slot_mapping, len(plan.blocks))
        now = stack.completions.now()
        self._host.admit(plan.kind)
        stack.plans.close(plan)
        if plan.put is not None:
            return self._start(
                plan, self._host.think(stack.planner.launch_put, plan.put, device_blocks)
            )
        get = self._host.think(stack.planner.plan_get, plan.blocks, plan.keys, device_blocks, now)
        layers = self._region.layers if layerwise and self._region is not None else 0
        graph = cut_by_layers(get.graph, layers, stack.planner.chunk_blocks)
        return self._start(plan, graph, get.saves, get.by_tier, device_blocks)

    def get_async(self, tokens: Any, slot_mapping: Any, *, namespace: Namespace = None) -> Transfer:
        """Match and launch: load the longest readable prefix into the slots of its tokens."""
        return self._launch_or_cancel(self.get_match(tokens, namespace=namespace), slot_mapping)

    def put_async(
        self,
        tokens: Any,
        slot_mapping: Any,
        *,
        namespace: Namespace = None,
        groups: Groups = WHOLE,
        held: Held = None,
        output_tokens: int | None = None,
    ) -> Transfer:
        """Store the whole blocks of a prompt from the device slots of its tokens; see `put_match`.

        Await it: the device slots may be reused. `await transfer.durable()`: the lowest tier has
        it. A put that finds no room fails as a whole: awaiting it raises CapacityError.
        """
        try:
            plan = self.put_match(
                tokens, namespace=namespace, groups=groups, held=held, output_tokens=output_tokens
            )
        except CapacityError as error:
            self.telemetry.add("refused_puts", 1)
            return refused("put", error, self._stack.completions.now)
        return self._launch_or_cancel(plan, slot_mapping)

    def _launch_or_cancel(self, plan: Plan, slot_mapping: Any) -> Transfer:
        try:
            return self.launch(plan, slot_mapping)
        except BaseException:
            plan.cancel()
            raise

    def _device_blocks(self, slot_mapping: Any, count: int) -> SlotIds:
        if self._region is None:
            raise InputError("no device memory is registered; call kv.register(kv_caches) first")
        return device_blocks(slot_mapping, count, self.tokens_per_block, self._region.blocks)

    # waiting and whole-cache verbs

    async def wait(
        self, transfers: Iterable[Transfer], *, timeout_ms: float | None = None
    ) -> list[Transfer]:
        """Wait until all are done or time is over; return those that are done, in their order."""
        return await self._host.wait(list(transfers), timeout_ms)

    async def flush(self) -> None:
        """Wait until everything accepted so far has reached its lowest tier or was dropped;
        StalledError after `settle_timeout_ms`, and it goes on.
        """
        await self._host.flush()

    def remove(self, tokens: Any, *, namespace: Namespace = None, groups: Groups = WHOLE) -> int:
        """Forget the blocks of a prompt from its end on, as far as no other prompt or transfer uses
        them.

        Returns the tokens forgotten, over all groups. Their disk slots are free once `flush`
        returns.
        """
        stack = self._stack
        parts = self._keys(as_tokens(tokens), namespace, groups)
        removed = sum(self._host.think(stack.ledger.remove, part) for part in parts)
        stack.discarder.wake()
        return removed * stack.spec.tokens_per_block

    async def reset(self) -> None:
        """Forget every block of every tier. Open plans are cancelled, running transfers finish
        first; calls made meanwhile find and store nothing.
        StalledError after `settle_timeout_ms`: a transfer that is not over keeps everything.
        """
        await self._host.reset()

    def events(self) -> EventStream:
        """Listen to what becomes readable in which tier and what leaves it; see EventStream."""
        return self._stack.events.listen()

    def usage(self) -> dict[str, dict[str, int]]:
        """Blocks per tier: capacity, free, resident; open plans and transfers under "manager"."""
        return self._stack.usage(transfers=len(self._host.transfers))
