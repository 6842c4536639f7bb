"""hazard: learn from every prompt how soon blocks of its kind are used again, keep what is best.

A model of the tier, told of whole prompts, keeps per-class reuse rates by age and says which blocks
should be held (`_core/hazard.h`); the blocks it gives up get the lowest rank of the tier and leave
first. An exact LRU runs beside it: while that has more hits, LRU is what the tier follows.
`Hazard.explain` says why a block stands where it does, `state` how the two compare.
docs/hazard.md holds formulas, figures and sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from flexkv._core import ffi, lib
from flexkv.errors import ConfigError
from flexkv.model import BlockIds, KeyArray
from flexkv.policies.ranked import RankedPolicy
from flexkv.protocols import PolicyContext

_AGED = 1e12  # seconds by which blocks that should leave look older than others
_SIZES = ("under 4 blocks", "4 to 15 blocks", "16 to 63 blocks", "64 blocks or more")
_SEEN = ("nothing or one block known", "less than half known", "half or more known")
_u8 = partial(ffi.from_buffer, "uint8_t[]")
_u32 = partial(ffi.from_buffer, "uint32_t[]")
_u64 = partial(ffi.from_buffer, "uint64_t[]")
_KINDS = ("all new", "only its first block known", "a branch", "a continuation")


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a block is kept or not: its class in words, how long it is unused, and what keeping it
    offers: `reuses_per_s` at best, `reuse_share` of the blocks that come into its age.
    """

    held: bool
    uses: int
    traits: tuple[str, ...]
    age_s: float
    reuses_per_s: float
    reuse_share: float

    def __str__(self) -> str:
        verdict = "held" if self.held else "given up"
        return (
            f"{verdict}: class ({', '.join(self.traits)}), used {self.uses + 1} times, unused for "
            f"{self.age_s:.0f} s; {self.reuse_share:.1%} of such blocks are reused about that age, "
            f"keeping one offers {self.reuses_per_s:.2g} reuses per second"
        )


class Hazard(RankedPolicy):
    """Learned eviction and admission with LRU as a safeguard."""

    ranked: ClassVar[bool] = True

    def open(self, context: PolicyContext) -> None:
        """Reserve the tables. `hazard_sabotage` turns the learned order round, for tests."""
        super().open(context)
        sabotage = bool(context.settings.get("hazard_sabotage", False))
        if not 0 < context.capacity_blocks < 1 << 27:
            raise ConfigError(
                f"hazard serves tiers of 1 to {(1 << 27) - 1} blocks, not "
                f"{context.capacity_blocks}: use lru"
            )
        made = lib.fx_hazard_open(context.capacity_blocks, context.max_blocks, sabotage)
        if made == ffi.NULL:
            raise MemoryError(f"no memory for a hazard of {context.capacity_blocks} blocks")
        self._model = ffi.gc(made, lib.fx_hazard_close)
        self._tier, self._resident = context.tier, 0
        self._count = ffi.new("uint32_t *")
        room = ffi.buffer(lib.fx_hazard_unwanted(made), 4 * context.max_blocks)
        self._unwanted = np.frombuffer(room, np.uint32)
        self._wanted = np.empty(context.max_blocks, np.bool_)
        self._wanted_at = _u8(self._wanted)

    # whole prompts

    def prompt(
        self, keys: KeyArray, known: BlockIds, now: float, output_tokens: int | None = None
    ) -> int:
        """Serve the prompt in the model; what that gives up leaves the tier first."""
        answer = -1 if output_tokens is None else output_tokens
        given, found = (_u64(keys), len(keys), now, answer), (_u32(known), len(known))
        wanted: int = lib.fx_hazard_put(self._model, *given, *found, self._count)
        if self._count[0]:
            self.order.rank(self._unwanted[: self._count[0]], now - _AGED)
        return wanted

    def placed(self, blocks: BlockIds, first: int) -> None:
        """Learn the numbers of the prompt's new blocks."""
        lib.fx_hazard_placed(self._model, _u32(blocks), first, len(blocks))

    # the tier

    def inserted(self, blocks: BlockIds, now: float) -> None:
        """Rank newcomers by time; those that should not be held are the next to leave."""
        self._resident += len(blocks)
        held: int = lib.fx_hazard_came(self._model, _u32(blocks), len(blocks), self._wanted_at)
        self._rank(blocks, now, held)

    def touched(self, blocks: BlockIds, now: float) -> None:
        """Learn from the use, unless it is that of the prompt just put; rank by time."""
        given = (_u32(blocks), len(blocks), now, self._wanted_at)
        held: int = lib.fx_hazard_used(self._model, *given)
        self._rank(blocks, now, held)

    def removed(self, blocks: BlockIds) -> None:
        """Forget their numbers; an empty tier has an empty model, what was learned stays."""
        lib.fx_hazard_left(self._model, _u32(blocks), len(blocks))
        self._resident -= len(blocks)
        if self._resident == 0:
            lib.fx_hazard_clear(self._model)

    def _rank(self, blocks: BlockIds, now: float, held: int) -> None:
        if held < len(blocks):
            wanted = self._wanted[: len(blocks)]
            self.order.rank(blocks[~wanted], now - _AGED)
            blocks = blocks[wanted]
        self.order.rank(blocks, now)

    # what it knows

    @property
    def state(self) -> dict[str, Any]:
        """Sizes of the model, hits of the learned order and of LRU so far, and which is followed.

        `lead` is by how many blocks the learned order is ahead, within the guard's limits.
        """
        state = ffi.new("fx_hazard_state *")
        lib.fx_hazard_look(self._model, state)
        names = (name for name, _ in ffi.typeof("fx_hazard_state").fields)
        found = {name: getattr(state, name) for name in names}
        return {**found, "following": "learned" if found["following"] else "lru"}

    def explain(self, block: int, now: float) -> Reason | None:
        """Say why a block of the tier is held or not; None for one no prompt has named."""
        reason = ffi.new("fx_hazard_reason *")
        if not lib.fx_hazard_explain(self._model, block, now, reason):
            return None
        base, kind, *more = reason.traits[0 : reason.depth]
        traits = [
            _KINDS[kind >> 1],
            _SEEN[base >> 1 & 3],
            "reused" if base & 1 else "new",
            "at the end" if base >> 3 & 1 else "before the end",
            *(["at the start"] if base >> 4 & 1 else []),
            *(["more than 4 new blocks"] if kind & 1 else []),
            *(_SIZES[size] for size in more[:1]),
            *(f"answer level {level}" for level in more[1:]),
        ]
        return Reason(
            bool(reason.held),
            reason.uses,
            tuple(traits),
            now - reason.last_use,
            reason.value,
            reason.hazard,
        )

    def check_integrity(self) -> None:
        """Derive counts and links of the model by a full scan; AssertionError if one differs."""
        wrong = lib.fx_hazard_check(self._model)
        if wrong != ffi.NULL:
            raise AssertionError(f"hazard: {ffi.string(wrong).decode()}")
