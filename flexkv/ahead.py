"""What a manager does ahead of requests, told by those who know what comes: `prefetch_async` (bring
a prompt near) and `retain` (keep one); `Ahead`, the base of `KVManager`, has them and what all of a
manager's calls share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexkv.config import FlexKVConfig
from flexkv.errors import CapacityError
from flexkv.groups import WHOLE, GroupKeys, split
from flexkv.hosting import Host
from flexkv.keys import as_tokens
from flexkv.model import ABSENT, BlockIds, CacheGroup, KeyArray, SlotIds, TransferGraph
from flexkv.protocols import Region
from flexkv.request import Request
from flexkv.stack import Stack
from flexkv.telemetry import Telemetry
from flexkv.transfer import Plan, Transfer, refused

Namespace = Sequence[str] | None
Groups = Sequence[CacheGroup]


class Ahead:
    """The part of a manager that starts transfers, and those that no request waits for."""

    def __init__(self, config: FlexKVConfig) -> None:
        self.config = config
        self.telemetry = Telemetry()
        self._host = Host(config, self.telemetry, self._bring)
        self._region: Region | None = None

    @property
    def _stack(self) -> Stack:
        return self._host.stack()

    @property
    def tokens_per_block(self) -> int:
        """Tokens of one block."""
        return self._stack.spec.tokens_per_block

    def _keys(
        self, tokens: Any, namespace: Namespace, groups: Groups, kind: str = "", end: Any = None
    ) -> list[GroupKeys]:
        stack = self._stack
        keys = stack.keyring.chain(tokens[:end], stack.keyring.root(namespace))
        if kind and (tell := self.telemetry.on_request) is not None:
            tell(kind, len(tokens), keys, stack.completions.now())
        return split(stack.keyring, keys, groups)

    # what is needed soon

    def prefetch_async(
        self, tokens: Any, *, namespace: Namespace = None, groups: Groups = WHOLE
    ) -> Transfer:
        """Promote the longest readable prefix into host memory; await it or forget it. Dropped
        under overload.

        Args:
            groups: of a hybrid model, as in `get_match`.
        """
        stack = self._stack
        tokens = as_tokens(tokens)
        usable = 0 if self._host.resetting else len(tokens)
        self.telemetry.add("queried_blocks", usable // stack.spec.tokens_per_block)
        parts = self._keys(tokens, namespace, groups, "prefetch", usable)
        plan = self._host.think(stack.plans.read, parts, 0, "prefetch")
        try:
            self._host.admit("prefetch")
        except CapacityError as error:
            plan.cancel()
            self.telemetry.add("dropped_blocks", len(plan.blocks), work="prefetch")
            return refused("prefetch", error, stack.completions.now)
        return self._promote(plan)

    def _promote(self, plan: Plan) -> Transfer:
        stack = self._stack
        stack.plans.close(plan)
        get = self._host.think(
            stack.planner.plan_get, plan.blocks, plan.keys, None, stack.completions.now()
        )
        return self._start(plan, get.graph, get.saves, get.by_tier)

    def _bring(self, blocks: BlockIds, keys: KeyArray) -> Transfer:
        """Promote blocks for those who lend them to other nodes; takes over one pin of each."""
        stack = self._stack
        tokens = len(blocks) * stack.spec.tokens_per_block
        plan = Plan(
            "prefetch",
            offset=0,
            matched=tokens,
            blocks=blocks,
            keys=keys,
            parts=(tokens,),
            reach=tokens,
            cancel=stack.plans.cancel,
        )
        try:
            self._host.admit("prefetch")
        except CapacityError as error:
            plan.cancel()
            self.telemetry.add("dropped_blocks", len(blocks), work="prefetch")
            return refused("prefetch", error, stack.completions.now)
        return self._promote(plan)

    # what is worth keeping

    def retain(
        self,
        tokens: Any,
        *,
        namespace: Namespace = None,
        priority: int | None = None,
        ttl_s: float | None = None,
        steps: int | None = None,
        groups: Groups = WHOLE,
    ) -> bool:
        """Keep the blocks of a prompt, there already or not, while others leave.

        A hint is a bias and no lock: hinted blocks leave after all others, those of low priority
        first; hints hold at most `retain_share` of each tier, the least important blocks beyond
        that are like any others. A new hint on the same tokens takes the place of the old one,
        `priority=0` or `ttl_s=0` takes it back. What prompts share counts as its most important
        hint says.

        Args:
            priority: 1 to 100; 50 if neither it nor `steps` is given, 0 with `steps` alone.
            ttl_s: seconds until the hint ends: `retain_ttl_s` if not given, `retain_max_ttl_s` at
                most.
            steps: how many steps from now the run begins that needs the prompt; sooner counts more
                among hints of one priority. At `prefetch_lead_steps` or nearer, what only the disk
                holds is promoted in the background, if nothing else has to wait for that.
            groups: of a hybrid model, as in `get_match`.

        Returns:
            Whether there is a hint on the prompt now; False also where it found no room in the
            table of hints (`retain_blocks`).
        """
        stack = self._stack
        parts = self._keys(as_tokens(tokens), namespace, groups)
        hints, now = stack.ledger.hints, stack.completions.now()
        kept = self._host.think(
            hints.retain, parts, now, priority=priority, ttl_s=ttl_s, steps=steps
        )
        near = steps is not None and steps <= self.config.prefetch_lead_steps
        if kept and near and stack.ledger.stores and not self._host.resetting:
            self._lead(parts)
        return kept

    def _lead(self, parts: list[GroupKeys]) -> None:
        """Promote a prompt that will be needed soon; the first work to be dropped under load."""
        stack = self._stack
        plan = self._host.think(stack.plans.read, parts, 0, "prefetch", counted=False)
        host = stack.ledger.host.number
        far = int((stack.index.states(host, plan.blocks) == ABSENT).sum())
        if far and self._host.spare("prefetch"):
            self.telemetry.add("lead_blocks", far)
            self._promote(plan)
            return
        plan.cancel()
        self.telemetry.add("dropped_blocks", far, work="lead")

    # starting transfers

    def _start(
        self,
        plan: Plan,
        graph: TransferGraph,
        saves: TransferGraph | None = None,
        by_tier: dict[str, int] | None = None,
        device_blocks: SlotIds | None = None,
    ) -> Transfer:
        """Hand a graph to the host's task group; the plan's pins go to the request."""
        stack = self._stack
        if saves is not None:
            self._host.save(saves)
        request = Request(
            plan,
            stack.engine.start(graph, self._region, plan.tag),
            tokens_per_block=stack.spec.tokens_per_block,
            by_tier=by_tier or {},
            device_blocks=device_blocks,
            clock=stack.completions.now,
            durable=self._wait_durable,
            limit_ms=self.config.settle_timeout_ms,
            telemetry=self.telemetry,
        )
        self._host.carry(request)
        return request.transfer

    async def _wait_durable(self, transfer: Transfer) -> None:
        await self._stack.spiller.reached(transfer.blocks, transfer.keys)
        self._host.check()
