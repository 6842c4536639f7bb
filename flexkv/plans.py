"""Plans that are open: matches that hold blocks until somebody launches or cancels them.

`Plans.watch` (cancel it by itself after its time), `close` (launched), `cancel`, `cancel_all`.
"""

from __future__ import annotations

from flexkv.completion import Completions
from flexkv.planner import Planner
from flexkv.telemetry import Telemetry, log
from flexkv.transfer import Plan
from flexkv.waiting import Deadlines


class Plans:
    """The open plans of a manager; each cancels itself after `ttl_ms`."""

    def __init__(
        self, planner: Planner, completions: Completions, telemetry: Telemetry, ttl_ms: float
    ) -> None:
        self._planner, self._telemetry = planner, telemetry
        self._open: Deadlines[Plan] = Deadlines(completions, ttl_ms / 1e3, self._expire)

    def __len__(self) -> int:
        return len(self._open)

    def watch(self, plan: Plan) -> Plan:
        """Keep a plan until it is closed, cancelled or too old; an empty one holds nothing."""
        if len(plan.blocks):
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
