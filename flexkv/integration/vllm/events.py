"""KV events of host memory and disk, in vLLM's own words and under vLLM's own block hashes.

`open_events` gives an `EventTranslator`: `naming` (what vLLM calls the blocks of a request) -
`learn` (which keys those are) - `take` (what happened, as vLLM's KVCacheEvents) - `settle`, `busy`
(events that are still to come). The name of a block is kept while it is in a tier, in about 0.6 KB,
and `SPARE_NAMES` of others. What a disk tier held at start is announced when a request has shown
what vLLM calls it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.distributed import kv_events
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core import kv_cache_utils

from flexkv.errors import FlexKVError
from flexkv.events import BlockEvent, EventStream
from flexkv.model import HOST, KeyArray
from flexkv.sync import BlockingKVManager
from flexkv.telemetry import log

SPARE_NAMES = 65_536  # names of blocks that are in no tier (yet, or between two)
CPU = getattr(kv_events, "MEDIUM_CPU", "CPU")
STORAGE = getattr(kv_events, "MEDIUM_STORAGE", "STORAGE")
_VISIT_S = 0.05  # a busy loop is asked again with the next step
_LOCAL = {"locality": "LOCAL"}
_STORED_FIELDS = frozenset(BlockStored.__struct_fields__)
_REMOVED_FIELDS = frozenset(BlockRemoved.__struct_fields__)


@dataclass(frozen=True, slots=True)
class Naming:
    """What vLLM calls the first blocks of a request, and what is in them."""

    hashes: list[Any]
    tokens: bytes  # int32, all blocks
    lora: tuple[int | None, str | None]
    extra: list[tuple[Any, ...] | None]


class _Block:
    """A block that is in a tier, or whose name is known (`named`)."""

    __slots__ = ("extra", "group", "hash", "lora", "named", "parent", "tiers", "tokens")
    hash: Any
    parent: Any
    tokens: bytes
    lora: tuple[int | None, str | None]
    extra: tuple[Any, ...] | None
    group: int

    def __init__(self) -> None:
        self.named = False
        self.tiers = 0  # a bit for each


class NoEvents:
    """Nobody listens: nothing is named and nothing taken.

    `naming`, `take` and `busy` are for vLLM's thread, `learn` and `settle` for the manager's.
    """

    @property
    def busy(self) -> bool:
        """Whether there is something to take, or soon will be."""
        return False

    def naming(self, request: Any, tokens: NDArray[np.int32], blocks: int) -> Naming | None:
        """Note what vLLM calls the first `blocks` blocks of a request; None if it does not."""
        return None

    def learn(self, keys: KeyArray, naming: Naming | None, first: int = 0, group: int = 0) -> None:
        """Hear the keys of blocks in a group of layers, from block `first` of the named ones on."""

    def take(self) -> list[KVCacheEvent]:
        """Return what happened since the last time."""
        return []

    def settle(self) -> Coroutine[Any, Any, None]:
        """Be busy, from this call on, until what has been stored so far is on the disk or given up.
        The returned coroutine has to be run for that.
        """
        return self._settled()

    async def _settled(self) -> None:
        """Nobody is to be told."""


class EventTranslator(NoEvents):
    """Listens to a manager on behalf of vLLM's scheduler."""

    def __init__(self, kv: BlockingKVManager, tokens_per_block: int, vllm_config: Any) -> None:
        self._kv, self._size = kv, tokens_per_block
        self._scale = _hashes_per_block(vllm_config.cache_config, tokens_per_block)
        published = kv_cache_utils.maybe_convert_block_hash(bytes(range(32)))
        self._as_numbers = isinstance(published, int)
        self._stream: EventStream = kv.events()
        self._learned: deque[tuple[KeyArray, Naming, int, int]] = deque()
        self._bits: dict[str, int] = {}  # of each tier
        self._blocks: dict[bytes, _Block] = {}
        self._spare: dict[bytes, None] = {}  # keys of those that are in no tier, oldest first
        # several keys may stand for one hash: flexkv tells apart what vLLM does not (images that
        # come later in the prompt); the hash is there as long as one of them is
        self._held: dict[str, dict[tuple[Any, int], int]] = {CPU: {}, STORAGE: {}}
        self._settling = 0
        for event in kv.visit(self._stream.take):
            self._enter(event)  # nameless: nothing to tell yet

    # --- vLLM's thread

    def naming(self, request: Any, tokens: NDArray[np.int32], blocks: int) -> Naming | None:
        """See NoEvents."""
        scale = self._scale
        hashes = list(request.block_hashes[scale - 1 : blocks * scale : scale])
        if not hashes or len(hashes) < blocks:
            return None
        if self._as_numbers:  # as maybe_convert_block_hash has it, which asks the environment
            hashes = [int.from_bytes(name[-8:], "big") for name in hashes]
        lora = request.lora_request
        return Naming(
            hashes,
            tokens[: blocks * self._size].tobytes(),
            (None, None) if lora is None else (lora.lora_int_id, lora.lora_name),
            _extra_keys(request, blocks, self._size),
        )

    @property
    def busy(self) -> bool:
        """See NoEvents."""
        return self._settling > 0 or self._stream.pending

    def take(self) -> list[KVCacheEvent]:
        """See NoEvents."""
        if not self._stream.pending and not self._learned:
            return []
        try:
            asked = self._stream.pending
            happened = self._kv.visit(self._stream.take, timeout_s=_VISIT_S) if asked else []
        except TimeoutError:  # it is busy, or hangs: with one of the next steps
            return []
        # in this order: whatever was stored by then has been learned by then
        events: list[KVCacheEvent] = []
        while self._learned:
            events += self._adopt(*self._learned.popleft())
        for event in happened:
            events += self._translate(event)
        return events

    def _adopt(
        self, keys: KeyArray, naming: Naming, first: int, group: int
    ) -> Iterator[KVCacheEvent]:
        """Give blocks their names; announce those that are in a tier already."""
        late: dict[str, list[_Block]] = {}
        blocks, spare, step = self._blocks, self._spare, self._size * 4
        for number, key in enumerate(_each(keys), first):
            block = blocks.get(key)
            if block is None:
                block = blocks[key] = _Block()
                spare[key] = None
            elif block.named:
                continue
            block.named, block.group, block.hash = True, group, naming.hashes[number]
            block.parent = naming.hashes[number - 1] if number else None
            block.tokens = naming.tokens[number * step : (number + 1) * step]
            block.lora, block.extra = naming.lora, naming.extra[number]
            if block.tiers:
                for tier, bit in self._bits.items():
                    if block.tiers & bit:
                        late.setdefault(tier, []).append(block)
        self._trim()
        for tier, there in late.items():
            yield from self._announce(_medium(tier), there)

    def _translate(self, event: BlockEvent) -> Iterable[KVCacheEvent]:
        medium, bit = _medium(event.tier), self._bit(event.tier)
        if event.kind == "stored":
            return self._announce(medium, self._enter(event))
        if event.kind == "removed":
            return self._take_back(medium, self._leave(bit, _each(event.keys)))
        keys = [key for key, block in self._blocks.items() if block.tiers & bit]
        return self._take_back(medium, self._leave(bit, keys))

    def _bit(self, tier: str) -> int:
        return self._bits.setdefault(tier, 1 << len(self._bits))

    def _enter(self, event: BlockEvent) -> list[_Block]:
        """Book blocks as being in a tier; return those that have a name."""
        named, bit = [], self._bit(event.tier)
        blocks, spare = self._blocks, self._spare
        for key in _each(event.keys):
            block = blocks.get(key)
            if block is None:
                block = blocks[key] = _Block()
            elif not block.tiers:
                del spare[key]
            block.tiers |= bit
            if block.named:
                named.append(block)
        return named

    def _leave(self, bit: int, keys: Iterable[bytes]) -> list[_Block]:
        """Book blocks as having left a tier; return those that have a name."""
        named = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None or not block.tiers & bit:
                continue
            block.tiers &= ~bit
            if block.named:
                named.append(block)
            if not block.tiers:
                if block.named:  # it may be on its way to another tier
                    self._spare[key] = None
                else:
                    del self._blocks[key]
        self._trim()
        return named

    def _trim(self) -> None:
        for key in list(islice(self._spare, max(0, len(self._spare) - SPARE_NAMES))):
            del self._spare[key], self._blocks[key]

    def _announce(self, medium: str, blocks: list[_Block]) -> Iterator[KVCacheEvent]:
        """Events for what was not in `medium` before, one for every stretch of a prompt."""
        held, stretch = self._held[medium], list[_Block]()
        for block in blocks:
            name = (block.hash, block.group)
            count = held[name] = held.get(name, 0) + 1
            if count > 1:
                continue
            if stretch and not _follows(stretch[-1], block):
                yield self._stored(medium, stretch)
                stretch = []
            stretch.append(block)
        if stretch:
            yield self._stored(medium, stretch)

    def _stored(self, medium: str, stretch: list[_Block]) -> KVCacheEvent:
        first = stretch[0]
        facts: dict[str, Any] = {
            "block_hashes": [block.hash for block in stretch],
            "parent_block_hash": first.parent,
            "token_ids": np.frombuffer(b"".join([b.tokens for b in stretch]), "<i4").tolist(),
            "block_size": self._size,
            "lora_id": first.lora[0],
            "medium": medium,
            "lora_name": first.lora[1],
            "extra_keys": [block.extra for block in stretch],
            "group_idx": first.group,
            **_LOCAL,
        }
        return BlockStored(**{name: facts[name] for name in facts.keys() & _STORED_FIELDS})

    def _take_back(self, medium: str, blocks: list[_Block]) -> Iterator[KVCacheEvent]:
        """Events for what is not in `medium` any more."""
        held, gone = self._held[medium], dict[int, list[Any]]()
        for block in blocks:
            name = (block.hash, block.group)
            held[name] -= 1
            if not held[name]:
                del held[name]
                gone.setdefault(block.group, []).append(block.hash)
        for group, hashes in gone.items():
            facts = {"block_hashes": hashes, "medium": medium, "group_idx": group, **_LOCAL}
            yield BlockRemoved(**{name: facts[name] for name in facts.keys() & _REMOVED_FIELDS})

    # --- the manager's thread

    def learn(self, keys: KeyArray, naming: Naming | None, first: int = 0, group: int = 0) -> None:
        """See NoEvents."""
        if naming is not None and len(keys):
            self._learned.append((keys[: len(naming.hashes) - first], naming, first, group))

    def settle(self) -> Coroutine[Any, Any, None]:
        """See NoEvents."""
        self._settling += 1
        return self._settled()

    async def _settled(self) -> None:
        try:
            await self._kv.manager.flush()
        except FlexKVError as error:  # it is closed meanwhile: nobody asks for events any more
            log.debug("vllm.events_cut_short", error=repr(error))
        finally:
            self._settling -= 1


def open_events(kv: BlockingKVManager, tokens_per_block: int, vllm_config: Any) -> NoEvents:
    """Listen to a manager if this engine publishes KV events."""
    config = getattr(vllm_config, "kv_events_config", None)
    if config is None or not config.enable_kv_cache_events:
        return NoEvents()
    return EventTranslator(kv, tokens_per_block, vllm_config)


def _follows(before: _Block, block: _Block) -> bool:
    """Whether two blocks stand side by side in a prompt."""
    return before.hash == block.parent and before.group == block.group and before.lora == block.lora


def _medium(tier: str) -> str:
    return CPU if tier == HOST else STORAGE


def _each(keys: KeyArray) -> list[bytes]:
    """The keys one by one."""
    rows: list[bytes] = np.ascontiguousarray(keys).view("V16").ravel().tolist()
    return rows


def _hashes_per_block(cache_config: Any, tokens_per_block: int) -> int:
    """How many hashes of vLLM a block has: more than one with a finer prefix_match_unit."""
    for field in ("hash_block_size", "prefix_match_unit"):
        unit = getattr(cache_config, field, None)
        if isinstance(unit, int) and unit and tokens_per_block % unit == 0:
            return tokens_per_block // unit
    return 1


def _extra_keys(request: Any, blocks: int, size: int) -> list[tuple[Any, ...] | None]:
    """What else than tokens went into each block's hash, as vLLM publishes it."""
    if (
        request.lora_request is None
        and not getattr(request, "cache_salt", None)
        and not getattr(request, "mm_features", None)
    ):
        return [None] * blocks
    generate, extra, at = kv_cache_utils.generate_block_hash_extra_keys, [], 0
    for number in range(blocks):
        keys, at = generate(request, number * size, (number + 1) * size, at)
        extra.append(keys)
    untag = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return extra if untag is None else untag(extra)
