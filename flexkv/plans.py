"""Plans that are open: matches that hold blocks until somebody launches or cancels them.

`Plans.read` (blocks that are there), `take` (room for blocks) - `close` (launched), `cancel`,
`cancel_all`. A plan that nobody launches cancels itself after its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexkv.brain import Brain
from flexkv.completion import Completions
from flexkv.cuts import read
from flexkv.groups import GroupKeys, joined
from flexkv.telemetry import Telemetry, log
from flexkv.transfer import Kind, Plan
from flexkv.waiting import Deadlines


class Plans:
    """The open plans of a manager; each cancels itself after `ttl_ms`."""

    def __init__(
        self,
        brain: Brain,
        completions: Completions,
        telemetry: Telemetry,
        tokens_per_block: int,
        ttl_ms: float,
    ) -> None:
        self._planner, self._worth, self._size = brain.planner, brain.worth, tokens_per_block
        self._completions, self._telemetry = completions, telemetry
        self._open: Deadlines[Plan] = Deadlines(completions, ttl_ms / 1e3, self._expire)

    def __len__(self) -> int:
        return len(self._open)

    def read(
        self,
        groups: Sequence[GroupKeys],
        first: int,
        kind: Kind = "get",
        *,
        counted: bool = True,
        weighed: bool = False,
    ) -> Plan:
        """Plan to read the longest prefix that every group can give, from block `first` on; if it
        is to be `weighed`, as far as it is worth fetching.
        """
        worth = self._worth if weighed else None
        cut = read(self._planner, worth, groups, first, self._completions.now())
        (end, blocks, reach), declined = cut.match, cut.declined
        self._telemetry.add("hit_blocks", cut.end if counted else 0)
        for tier, count in declined.items():
            self._telemetry.add("declined_blocks", count, tier=tier)
        keys = [g.keys[end - len(b) : end] for g, b in zip(groups, blocks, strict=True)]
        plan = Plan(
            kind,
            offset=first * self._size,
            matched=max(0, end - first) * self._size,
            blocks=joined(blocks),
            keys=joined(keys),
            parts=tuple(len(part) * self._size for part in blocks),
            reach=reach * self._size,
            declined_blocks=sum(declined.values()),
            cancel=self.cancel,
        )
        return self._watch(plan)

    def take(
        self,
        groups: Sequence[GroupKeys],
        held: Sequence[Any] | None,
        now: float,
        output_tokens: int | None = None,
    ) -> Plan:
        """Plan to write blocks: all of every group, or those with the numbers in `held`.

        Raises:
            CapacityError: the host cannot take them all now; nothing was changed.
            InputError: `held` does not fit.
        """
        tokens = len(groups[0].keys) * self._size
        if held is not None:
            groups = [group.only(numbers) for group, numbers in zip(groups, held, strict=True)]
        put = self._planner.plan_put(groups, now, output_tokens)
        plan = Plan(
            "put",
            offset=0,
            matched=tokens,
            blocks=put.blocks,
            keys=put.keys,
            parts=tuple(len(group.keys) * self._size for group in groups),
            reach=tokens,
            put=put,
            cancel=self.cancel,
        )
        return self._watch(plan)

    def _watch(self, plan: Plan) -> Plan:
        if len(plan.blocks):  # an empty one holds nothing
            self._open.add(plan)
        return plan

    def close(self, plan: Plan) -> bool:
        """Take a plan out of the books, giving nothing back; False if it was closed before."""
        was_open, plan.open = plan.open, False
        self._open.remove(plan)
        return was_open

    def cancel(self, plan: Plan) -> None:
        """Give back what a plan holds; nothing happens if it was closed before."""
        if not self.close(plan):
            return
        if plan.put is not None:
            self._planner.cancel_put(plan.put)
        else:
            self._planner.release(plan.blocks)

    def cancel_all(self) -> None:
        """Cancel every open plan."""
        for plan in self._open.items():
            self.cancel(plan)
        self._open.clear()

    def _expire(self, plan: Plan) -> None:
        log.warning("plan.expired", kind=plan.kind, blocks=len(plan.blocks))
        self._telemetry.add("expired_plans", 1, kind=plan.kind)
        self.cancel(plan)
