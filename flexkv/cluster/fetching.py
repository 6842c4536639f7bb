"""Reading from one peer: lease, bytes, proof; and what is known of each.

`Fetcher.fetch` (blocks of one node, over its connections) - `cost` - `Nodes` (what it must know of
others) - `Courier` (another engine than plain TCP moves the bytes) - `PeerSettings`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import anyio
import numpy as np
from numpy.typing import NDArray

from flexkv.backends.disk.records import Checksums
from flexkv.backends.remote.breaker import Breaker
from flexkv.cluster import peerwire as wire
from flexkv.cluster.blocks import Passage, Sums
from flexkv.cluster.peerlink import Cost, Grant, Me, PeerLink, RefusedError
from flexkv.errors import CapacityError, ConfigError, TransferError
from flexkv.model import DAMAGED, FAILED, LANDED, SKIPPED, KeyArray, SlotIds, Statuses
from flexkv.protocols import BlockIO, Services, as_statuses
from flexkv.telemetry import log

_THREADS = 2  # that receive blocks
_RELEASE_S = 1.0


class Nodes(Protocol):
    """The other nodes, as the directory sees them."""

    @property
    def epoch(self) -> int:
        """The cluster's epoch."""
        ...

    def address(self, number: int, courier: str) -> str | None:
        """Where the courier of a node listens, None when it is gone."""
        ...

    def incarnation(self, number: int) -> int | None:
        """Which life of the node its holdings are of, None when it is gone."""
        ...


class Courier(Protocol):
    """Pulls blocks that are on lease from an owner's arena into ours, one-sided.

    `name` is what nodes list their address under. A block that did not come is FAILED; what came is
    verified by the caller. When `fetch` ends, also by cancellation, no byte may land any more.
    """

    name: ClassVar[str]

    async def lend(self, host: str) -> str:
        """Let others read our arena, while this is open; `host` is what they know us as.

        Returns the address that nodes list.
        """
        ...

    async def watch(self, moved: Callable[[str], None]) -> None:
        """Keep alive what others read from; say where it is whenever that changes ("": nowhere)."""
        ...

    async def fetch(
        self, address: str, grant: Grant, offsets: NDArray[np.uint64], slots: SlotIds
    ) -> Statuses:
        """Fill arena `slots` from byte `offsets` of the arena at `grant.welcome.base` there."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """Limits of reads from peers.

    A batch takes at most `timeout_ms`, over `connections` to each peer; `failures` in a row and the
    peer is left alone for `retry_ms`, for longer each time.
    """

    timeout_ms: int = 2000
    connections: int = 4
    failures: int = 3
    retry_ms: int = 500


@dataclass(eq=False, slots=True)
class _Peer:
    """What we know of one node: its connections, its health, and its cost by medium."""

    link: PeerLink
    breaker: Breaker
    courier: Breaker  # of another engine than plain TCP
    costs: dict[int, Cost] = field(default_factory=dict)

    def cost(self, medium: int) -> Cost:
        return self.costs.setdefault(medium, Cost())


class Fetcher:
    """Reads blocks of peers into the arena of `services`. Each peer is known by its number."""

    def __init__(
        self,
        services: Services,
        nodes: Nodes,
        me: Me,
        courier: Courier | None,
        settings: PeerSettings,
    ) -> None:
        self._arena, self._nodes, self._me = services.arena, nodes, me
        self._courier, self._settings = courier, settings
        self._sums = Sums(services.completions, services.arena, me.block_bytes)
        self._now = services.completions.now
        self._threads = anyio.CapacityLimiter(_THREADS)
        self._peers: dict[int, _Peer] = {}
        self.requests = 0  # so far
        self.fallback_blocks = 0  # that came over TCP because the courier did not bring them

    def cost(self, node: int, medium: int) -> Cost:
        """What reads from a medium of a node have taken."""
        peer = self._peers.get(node)
        return peer.cost(medium) if peer else Cost()

    def close(self) -> None:
        """Give all connections up."""
        for peer in self._peers.values():
            peer.link.close()
        self._peers.clear()

    async def fetch(
        self, node: int, medium: int, part: BlockIO, epoch: int, limit_s: float
    ) -> Statuses:
        """Read from one node, in one request unless there are more blocks than fit one."""
        statuses = np.full(len(part), SKIPPED, np.uint8)  # not tried
        peer, incarnation = self._peer(node), self._nodes.incarnation(node)
        if peer is None or incarnation is None:
            return statuses
        ends = self._now() + limit_s
        for start in range(0, len(part), wire.MAX_BLOCKS):
            if not peer.breaker.admits(self._now()):
                break
            piece = slice(start, start + wire.MAX_BLOCKS)
            size, cost = len(part.keys[piece]) * self._me.block_bytes, peer.cost(medium)
            cost.pending_bytes += size
            try:
                statuses[piece] = await self._request(
                    node, peer, cost, part.keys[piece], part.host_slots[piece],
                    incarnation, epoch, ends,
                )  # fmt: skip
            except (CapacityError, RefusedError) as error:  # it is well, and says no
                log.debug("peer.no", node=node, error=str(error))
                peer.breaker.succeeded()
                break
            except (OSError, EOFError, wire.ProtocolError, ConfigError) as error:
                statuses[piece] = FAILED
                self._failed(node, peer, repr(error))
            finally:
                cost.pending_bytes -= size
        return statuses

    async def _request(
        self,
        node: int,
        peer: _Peer,
        cost: Cost,
        keys: KeyArray,
        slots: SlotIds,
        incarnation: int,
        epoch: int,
        ends: float,
    ) -> Statuses:
        """Read blocks through the courier, and what that does not bring, or all of them while it
        counts as down, over TCP.

        Raises: as `PeerLink.lease`.
        """
        courier, place = self._courier, None
        if courier and (listed := self._nodes.address(node, courier.name)):
            if peer.courier.admits(self._now()):
                place = listed
            else:
                self.fallback_blocks += len(keys)
        common = (incarnation, epoch)
        left_s = max(0.001, ends - self._now())
        statuses = await self._lease(node, peer, cost, keys, slots, *common, left_s, place)
        if courier is None or place is None:
            return statuses
        failed = np.flatnonzero(statuses == FAILED)
        if not len(failed):
            if peer.courier.succeeded():
                log.info("peer.courier_up", node=node, courier=courier.name)
            return statuses
        if peer.courier.failed(self._now()):
            log.warning("peer.courier_down", node=node, courier=courier.name, place=place)
        if (left_s := ends - self._now()) > 0:
            self.fallback_blocks += len(failed)
            statuses[failed] = await self._lease(
                node, peer, cost, keys[failed], slots[failed], *common, left_s, None
            )
        return statuses

    async def _lease(
        self,
        node: int,
        peer: _Peer,
        cost: Cost,
        keys: KeyArray,
        slots: SlotIds,
        incarnation: int,
        epoch: int,
        deadline_s: float,
        place: str | None,
    ) -> Statuses:
        """Lease and read blocks of one request, and verify what came: from `place` through the
        courier, or over TCP.

        Raises: as `PeerLink.lease`.
        """
        size = self._me.block_bytes
        began, courier = self._now(), self._courier

        def room(landed: NDArray[np.int64]) -> Passage:
            return Passage(self._arena, slots[landed], keys[landed], size)

        self.requests += 1
        grant = await peer.link.lease(
            keys,
            incarnation=incarnation,
            epoch=epoch,
            deadline_s=deadline_s,
            room=None if place else room,
        )
        statuses, landed = grant.statuses, grant.landed
        targets = slots[landed]
        sums = told = np.empty(0, np.uint64)
        if courier is not None and place and len(landed):
            left_s = began + deadline_s - self._now()
            pulled, sums = await self._pull(
                peer.link, courier, place, grant, targets, keys[landed], epoch, left_s / 2
            )
            if grant.told is None:  # nobody can say whether they are right
                pulled[pulled == LANDED] = SKIPPED if grant.late else FAILED
            statuses[landed], told = pulled, sums if grant.told is None else grant.told
        elif grant.arrival is not None:
            statuses[landed[grant.arrival.whole :]] = FAILED
            sums, told = grant.arrival.sums, grant.arrival.told
        elapsed_s = self._now() - began
        wrong = (statuses[landed] == LANDED) & (sums != told)
        if wrong.any() and grant.late:  # their places were others' by then
            statuses[landed[wrong]] = SKIPPED
        elif wrong.any():
            statuses[landed[wrong]] = DAMAGED
            grant.error = grant.error or f"{np.count_nonzero(wrong)} blocks with wrong bytes"
        if grant.error:
            self._failed(node, peer, grant.error)
        else:
            if peer.breaker.succeeded():
                log.info("peer.up", node=node, address=peer.link.address)
            if not (statuses[landed] == FAILED).any():
                cost.measured(grant.answered_s, len(landed) * size, elapsed_s - grant.answered_s)
        return statuses

    async def _pull(
        self,
        link: PeerLink,
        courier: Courier,
        place: str,
        grant: Grant,
        slots: SlotIds,
        keys: KeyArray,
        epoch: int,
        limit_s: float,
    ) -> tuple[Statuses, NDArray[np.uint64]]:
        """Have another engine move blocks on lease, as long as that lasts, and release them while
        their checksums are taken here; returns both.
        """
        statuses, sums = np.full(len(slots), FAILED, np.uint8), np.zeros(len(slots), np.uint64)
        job: Checksums | None = None
        try:
            with anyio.move_on_after(max(0.0, min(limit_s, grant.ttl_s - grant.answered_s))):
                answer = await courier.fetch(place, grant, grant.offsets(), slots)
                job = self._sums.begin(slots, keys)
                statuses = as_statuses(answer, len(slots)).copy()
        except Exception as error:
            log.debug("peer.courier", address=place, error=repr(error))
        finally:
            with anyio.CancelScope(shield=True):
                await self._let_go(link, grant, epoch)
        if job is not None:
            sums = await job.result()
        return statuses, sums

    async def _let_go(self, link: PeerLink, grant: Grant, epoch: int) -> None:
        try:
            await link.settle(grant, epoch=epoch, deadline_s=_RELEASE_S)
        except (OSError, EOFError, TransferError, CapacityError) as error:  # then it expires
            log.debug("peer.unreleased", address=link.address, error=repr(error))

    def _failed(self, node: int, peer: _Peer, error: str) -> None:
        if peer.breaker.failed(self._now()):
            log.warning("peer.down", node=node, address=peer.link.address, error=error)

    def _peer(self, node: int) -> _Peer | None:
        """What we know of a node, at the address that it has now."""
        address, peer = self._nodes.address(node, "tcp"), self._peers.get(node)
        if peer is not None and peer.link.address != address:
            peer.link.close()
            del self._peers[node]
            peer = None
        if peer is None and address is not None:
            settings = self._settings
            link = PeerLink(address, self._me, self._threads, settings.connections, self._now)
            retry_s = settings.retry_ms / 1e3
            peer = _Peer(link, Breaker(settings.failures, retry_s), Breaker(1, retry_s))
            self._peers[node] = peer
        return peer
