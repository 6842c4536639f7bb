"""What the connector's two sides tell each other through vLLM: `StepNews` (scheduler -> workers,
with every step).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass
class StepNews(KVConnectorMetadata):
    """News of one step.

    `step` numbers the steps. `sent` and `received` are requests whose saves and loads are over,
    `failed` the device blocks of those loads that must be computed, `failed_requests` those that
    must be computed from their start, `awaited` the loads (number, device blocks) that this step's
    forward pass has to wait for, `withdrawn` the device blocks that copies out of them lose with
    this step.
    """

    step: int = 0
    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    failed_requests: set[str] = field(default_factory=set)
    awaited: list[tuple[int, list[int]]] = field(default_factory=list)
    withdrawn: list[int] = field(default_factory=list)
