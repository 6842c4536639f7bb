"""Blocks of other nodes as a store: `PeerStore` behind the tier `peer`, read only.

`read` groups a batch by the cheapest holder of each block, asks every node once, verifies what
comes and falls back to the next holder: MISSING only when no holder has a block any more, FAILED
when one could not be asked. A reset meanwhile makes all of it MISSING.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

import anyio
import numpy as np
from numpy.typing import NDArray

from flexkv.cluster import peerwire as wire
from flexkv.cluster.fetching import Courier, Fetcher, Nodes, PeerSettings
from flexkv.cluster.holdings import NOBODY, REMOTE_MEDIUM
from flexkv.cluster.peerlink import Cost, Me
from flexkv.errors import ClosedError
from flexkv.model import (
    DAMAGED,
    FAILED,
    LANDED,
    MISSING,
    SKIPPED,
    IOStatus,
    KeyArray,
    SlotIds,
    Statuses,
)
from flexkv.protocols import (
    API_VERSION,
    BlockIO,
    DeviceInfo,
    Recovered,
    Services,
    StorageBackend,
    as_statuses,
)
from flexkv.telemetry import log

Positions = NDArray[np.int64]
# Of two answers about a block that did not come, the one that leaves more hope is told.
_BY_HOPE = np.array([MISSING, DAMAGED, SKIPPED, FAILED], np.uint8)
_NAMES = [status.name.lower() for status in IOStatus]
_HOPE = np.zeros(len(IOStatus), np.uint8)
_HOPE[_BY_HOPE] = np.arange(len(_BY_HOPE))


class Holders(Protocol):
    """Who holds the blocks in slots of the tier; see `flexkv.cluster.holdings`."""

    def holders(self, slots: SlotIds) -> NDArray[Any]:
        """Fields `node` and `medium`, shape [blocks, holders], the cheapest medium first."""
        ...

    def lost(self, number: int, keys: KeyArray, *, shared: bool = False) -> None:
        """Note that a node, or the store that it shares, has these blocks no more."""
        ...


class PeerStore:
    """What other nodes hold, read through their leases; and, by key, what lies in a shared store.

    Args:
        remote: the store that all nodes share, for holdings on it.
        courier: None: plain TCP. Peers that do not list another one are read over TCP, too.
    """

    flexkv_api: ClassVar[int] = API_VERSION
    addressing: ClassVar[Literal["slot", "key"]] = "slot"
    alignment_bytes = 1

    def __init__(
        self,
        holdings: Holders,
        nodes: Nodes,
        *,
        node: str,
        secret: bytes = b"",
        remote: StorageBackend | None = None,
        courier: Courier | None = None,
        settings: PeerSettings | None = None,
    ) -> None:
        self._holdings, self._nodes, self._remote, self._courier = holdings, nodes, remote, courier
        self._node, self._handshake = node, wire.Handshake(secret)
        self._settings = settings or PeerSettings()
        self._fetcher: Fetcher | None = None
        self._remote_cost = Cost()
        self.blocks: Counter[str] = Counter()  # by what became of them, each try by itself

    @classmethod
    def probe(cls) -> Sequence[DeviceInfo]:
        """Say that it is there; peers are asked when blocks are moved."""
        return [DeviceInfo("peer")]

    async def open(self, services: Services) -> Recovered | None:
        """Take the services; nothing is known of peers yet."""
        size = services.block_bytes or services.identity.spec.block_bytes
        me = Me(self._node, services.identity.digest(), size, self._handshake)
        self._block_bytes, self._now = size, services.completions.now
        self._fetcher = Fetcher(services, self._nodes, me, self._courier, self._settings)
        return None

    async def write(self, batch: BlockIO) -> Statuses:
        """Refuse: blocks come to other nodes because these want them."""
        return np.full(len(batch), FAILED, np.uint8)

    async def discard(self, batch: BlockIO) -> Statuses:
        """Do nothing: what we forget of others is theirs."""
        return np.full(len(batch), LANDED, np.uint8)

    async def aclose(self) -> None:
        """Give the connections up."""
        fetcher, self._fetcher = self._fetcher, None
        if fetcher is not None:
            fetcher.close()
            if self._courier is not None:
                await self._courier.aclose()

    @property
    def requests(self) -> int:
        """Requests to peers, so far."""
        return self._fetcher.requests if self._fetcher else 0

    @property
    def fallback_blocks(self) -> int:
        """Blocks that were read over TCP because the courier did not bring them, so far."""
        return self._fetcher.fallback_blocks if self._fetcher else 0

    # --- reading

    async def read(self, batch: BlockIO) -> Statuses:
        """Fill the arena slots, each block from its cheapest holder, or else from the next one."""
        if self._fetcher is None:
            raise ClosedError("the peer store is not open")
        epoch, ends = self._nodes.epoch, self._now() + self._settings.timeout_ms / 1e3
        rows = self._holdings.holders(batch.store_slots)
        open_ = rows["node"] != NOBODY  # holders that were not asked yet
        statuses = np.full(len(batch), MISSING, np.uint8)
        while (left := ends - self._now()) > 0:
            waiting = np.flatnonzero((statuses != LANDED) & open_.any(axis=1))
            if not len(waiting):
                break
            chosen = self._choose(rows, open_, waiting)
            last = not (open_[waiting].sum(axis=1) > 1).any()
            asked = _grouped(rows, waiting, chosen)
            open_[waiting, chosen] = False
            if len(shared := asked.get((NOBODY, REMOTE_MEDIUM), ())):  # whoever put it there
                open_[shared] &= rows["medium"][shared] != REMOTE_MEDIUM
            await self._ask(batch, rows, asked, statuses, epoch, left if last else left / 2)
        statuses[(statuses == MISSING) & open_.any(axis=1)] = SKIPPED  # nobody was asked in time
        if self._nodes.epoch != epoch:  # a reset: nothing from before it is good
            statuses[:] = MISSING
        return statuses

    def _choose(self, rows: NDArray[Any], open_: NDArray[np.bool_], blocks: Positions) -> Positions:
        """The column of each block's cheapest holder of those that are left."""
        left = open_[blocks]
        if np.count_nonzero(left) == len(left):  # mostly there is no choice
            only: Positions = np.argmax(left, axis=1)
            return only
        nodes, media = rows["node"][blocks], rows["medium"][blocks]
        price = np.full(nodes.shape, np.inf)
        holders = np.unique(np.stack((nodes[left], media[left])), axis=1).T
        size = len(blocks) * self._block_bytes
        for node, medium in holders.tolist():
            mine = left & (nodes == node) & (media == medium)
            # the better medium among those that were not measured
            price[mine] = self._cost(node, medium).expected_s(size) + 1e-9 * medium
        best: Positions = np.argmin(price, axis=1)
        return best

    def _cost(self, node: int, medium: int) -> Cost:
        if medium == REMOTE_MEDIUM:
            return self._remote_cost
        assert self._fetcher is not None
        return self._fetcher.cost(node, medium)

    async def _ask(
        self,
        batch: BlockIO,
        rows: NDArray[Any],
        asked: Mapping[tuple[int, int], Positions],
        statuses: Statuses,
        epoch: int,
        limit_s: float,
    ) -> None:
        """Read from several holders at once; a worse answer does not replace a better one."""

        async def one(node: int, medium: int, blocks: Positions) -> None:
            part = BlockIO(batch.host_slots[blocks], batch.store_slots[blocks], batch.keys[blocks])
            if medium == REMOTE_MEDIUM:
                found = await self._from_remote(part, limit_s)
            else:
                assert self._fetcher is not None
                found = await self._fetcher.fetch(node, medium, part, epoch, limit_s)
            missing = np.flatnonzero(found == MISSING)
            if len(missing):
                self._lose(node, rows[blocks[missing]], part.keys[missing])
            for status, count in enumerate(np.bincount(found).tolist()):
                self.blocks[_NAMES[status]] += count
            statuses[blocks] = _told(statuses[blocks], found)

        if len(asked) == 1:
            ((holder, blocks),) = asked.items()
            await one(*holder, blocks)
            return
        async with anyio.create_task_group() as group:
            for holder, blocks in asked.items():
                group.start_soon(one, *holder, blocks)

    def _lose(self, node: int, rows: NDArray[Any], keys: KeyArray) -> None:
        """Drop holdings that are none any more: of a node, or of all that share the store."""
        if node != NOBODY:
            self._holdings.lost(node, keys)
            return
        shared = rows["medium"] == REMOTE_MEDIUM
        for sharer in np.unique(rows["node"][shared]).tolist():
            here = (shared & (rows["node"] == sharer)).any(axis=1)
            self._holdings.lost(sharer, keys[here], shared=True)

    async def _from_remote(self, part: BlockIO, limit_s: float) -> Statuses:
        """Read from the shared store, which has time limits of its own; late is FAILED."""
        statuses = np.full(len(part), FAILED if self._remote else SKIPPED, np.uint8)
        if self._remote is None:
            return statuses
        size, began = len(part) * self._block_bytes, self._now()
        cost = self._remote_cost
        cost.pending_bytes += size
        try:
            answer = as_statuses(await self._remote.read(part), len(part))
        except Exception as error:  # as the engine does with what a store raises
            log.warning("peer.remote", blocks=len(part), error=repr(error))
            return statuses
        finally:
            cost.pending_bytes -= size
        cost.measured(0.0, size, self._now() - began)
        return answer


def _grouped(
    rows: NDArray[Any], blocks: Positions, columns: Positions
) -> dict[tuple[int, int], Positions]:
    """The blocks by whom to ask: (node, slowest medium there), or (NOBODY, REMOTE_MEDIUM)."""
    media = rows["medium"][blocks, columns]
    nodes = np.where(media == REMOTE_MEDIUM, NOBODY, rows["node"][blocks, columns])
    if len(nodes) and (nodes == nodes[0]).all():
        return {(int(nodes[0]), int(media.max())): blocks}
    asked = {}
    for node in np.unique(nodes).tolist():
        mine = nodes == node
        asked[node, int(media[mine].max())] = blocks[mine]
    return asked


def _told(old: Statuses, new: Statuses) -> Statuses:
    """What to say of blocks after one more answer: MISSING only if nobody may have them still."""
    best: Statuses = _BY_HOPE[np.maximum(_HOPE[old], _HOPE[new])]
    best[new == LANDED] = LANDED
    return best
