"""What the connector's two sides tell each other through vLLM: `StepNews` (scheduler -> workers,
with every step) and `FlexKVStats` (counts for vLLM's log and metrics).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


@dataclass
class StepNews(KVConnectorMetadata):
    """News of one step.

    `step` numbers the steps. `sent` and `received` are requests whose saves and loads are over,
    `failed` the device blocks of those loads that must be computed, `awaited` the loads (number,
    device blocks) that this step's forward pass has to wait for, `withdrawn` the device blocks that
    copies out of them lose with this step.
    """

    step: int = 0
    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    awaited: list[tuple[int, list[int]]] = field(default_factory=list)
    withdrawn: list[int] = field(default_factory=list)


@dataclass
class FlexKVStats(KVConnectorStats):
    """Counts since they were asked for last; all of them add up."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Start from nothing."""
        self.data = {}

    def add(self, name: str, amount: int = 1) -> None:
        """Count."""
        self.data[name] = self.data.get(name, 0) + amount

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counts of another."""
        for name, amount in other.data.items():
            self.add(name, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for the log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data
