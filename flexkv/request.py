"""A request under way: the transfer its caller holds, the run that moves its blocks, and how one
settles the other.

`Request.conclude` settles the transfer from the run as it stands, `report` tells telemetry;
`device_blocks` turns an engine's slot mapping into block numbers, checking every slot.
"""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from flexkv._core import ffi, lib
from flexkv.engine import Run
from flexkv.errors import InputError, TransferError
from flexkv.keys import as_tokens
from flexkv.model import SlotIds
from flexkv.telemetry import Telemetry, log
from flexkv.transfer import GetResult, Plan, PutResult, Transfer

_NO_BLOCKS: SlotIds = np.empty(0, np.uint32)
_NONE = np.empty(0, np.int64)


def device_blocks(slot_mapping: Any, count: int, tokens_per_block: int, limit: int) -> SlotIds:
    """Return the device blocks (uint32, [count]) that hold the first `count` blocks of a slot
    mapping.

    Raises:
        InputError: too few slots, or a block's slots are not consecutive, aligned and below `limit`
        blocks.
    """
    size = tokens_per_block
    slots = as_tokens(slot_mapping, name="slot_mapping")
    if len(slots) < count * size:
        raise InputError(
            f"slot_mapping has {len(slots)} slots, but {count} blocks of {size} tokens "
            f"need {count * size}"
        )
    blocks = np.empty(count, np.uint32)
    good = lib.fx_slots_to_blocks(
        ffi.from_buffer("char[]", slots),
        slots.itemsize == 8,
        count,
        size,
        limit,
        ffi.from_buffer("uint32_t[]", blocks),
    )
    if good != count:
        shown = slots[good * size : (good + 1) * size].tolist()
        raise InputError(
            f"slot_mapping of block {good} is {shown}: it must be {size} consecutive "
            f"slots that start at a multiple of {size}, of a block below {limit}"
        )
    return blocks


class Request:
    """One get, put or prefetch. Pins and slots are the run's until it ends, whoever listens to the
    transfer.
    """

    __slots__ = (
        "by_tier",
        "bypassed",
        "context",
        "declined",
        "device_blocks",
        "kind",
        "matched",
        "own",
        "run",
        "telemetry",
        "tokens",
        "transfer",
    )

    def __init__(
        self,
        plan: Plan,
        run: Run,
        *,
        tokens_per_block: int,
        by_tier: dict[str, int],
        device_blocks: SlotIds | None,
        clock: Callable[[], float],
        durable: Callable[[Transfer], Awaitable[None]],
        limit_ms: float,
        telemetry: Telemetry,
    ) -> None:
        self.kind, self.matched, self.run = plan.kind, sum(plan.parts), run
        self.tokens, self.by_tier, self.device_blocks = tokens_per_block, by_tier, device_blocks
        self.telemetry = telemetry
        self.context = contextvars.copy_context()  # what the caller's log lines carry
        self.declined = plan.declined_blocks
        self.bypassed = 0 if plan.put is None else plan.put.bypassed
        self.own = _NONE if plan.put is None else plan.put.positions  # not another put's blocks
        self.transfer = Transfer(
            plan.kind,
            self.matched,
            blocks=plan.blocks,
            keys=plan.keys,
            clock=clock,
            cancel=self._cancel,
            durable=durable,
            limit_ms=limit_ms,
        )
        for tier, count in by_tier.items():
            telemetry.add("tier_hit_blocks", count, tier=tier)

    def _cancel(self, transfer: Transfer) -> None:
        self.run.cancel()

    def conclude(self, *, timed_out: bool = False) -> None:
        """Settle the transfer from what has arrived. The first call counts; bytes that land later
        do not.
        """
        if self.transfer.done:
            return
        arrived = self.run.arrived
        count = len(arrived)
        whole = np.count_nonzero(arrived) == count
        prefix = count if whole else int(np.argmin(arrived))
        if self.kind == "put":
            self._conclude_put(prefix, int(np.count_nonzero(~arrived[self.own])), timed_out)
            return
        if self.kind == "get":
            self.telemetry.add("loaded_blocks", prefix)
        failed = _NO_BLOCKS
        if self.device_blocks is not None and not whole:
            failed = self.device_blocks[~arrived]
        cancelled = self.run.cancelled and not timed_out
        self.transfer.settle(
            lambda elapsed_ms, exposed_ms: GetResult(
                prefix * self.tokens,
                self.matched,
                self.by_tier,
                self.run.moved_bytes,
                elapsed_ms,
                exposed_ms,
                failed,
                cancelled,
                timed_out,
                self.declined,
            )
        )

    def _conclude_put(self, prefix: int, lost: int, timed_out: bool) -> None:
        new = len(self.own) - lost
        self.telemetry.add("stored_blocks", new)
        if self.bypassed:
            self.telemetry.add("bypassed_blocks", self.bypassed)
        if lost and (timed_out or not self.run.cancelled):
            why = "in time" if timed_out else "(see the log)"
            blocks = len(self.run.arrived)
            self.transfer.fail(
                TransferError(f"{lost} of {blocks} blocks of a put did not reach host memory {why}")
            )
            return
        self.transfer.settle(
            lambda elapsed_ms, exposed_ms: PutResult(
                prefix * self.tokens,
                new * self.tokens,
                self.run.moved_bytes,
                elapsed_ms,
                exposed_ms,
                self.run.cancelled,
                self.bypassed,
            )
        )

    def report(self) -> None:
        """Tell telemetry and log how the transfer ended."""
        elapsed_ms, exposed_ms = self.transfer.elapsed()
        add, observe = self.telemetry.add, self.telemetry.observe
        add("transfers", 1, kind=self.kind, outcome=self.transfer.outcome)
        observe("transfer_seconds", exposed_ms / 1e3, kind=self.kind, part="exposed")
        hidden_ms = elapsed_ms - exposed_ms
        observe("transfer_seconds", hidden_ms / 1e3, kind=self.kind, part="hidden")
        self.context.run(
            log.debug,
            "transfer.done",
            kind=self.kind,
            outcome=self.transfer.outcome,
            size_bytes=self.run.moved_bytes,
            elapsed_ms=elapsed_ms,
            exposed_ms=exposed_ms,
        )
