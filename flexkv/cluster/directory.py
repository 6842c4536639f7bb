"""Who holds what: `Directory.run` publishes this node's blocks and follows the others', `nodes` and
`address` say who they are, `epoch` which reset of the cluster counts, `drain`, `start_over`.

Nothing here is asked on the way of a request: holdings come into the index as they change.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import anyio
import msgspec

from flexkv.cluster.beat import Beat
from flexkv.cluster.follower import Books, Follower
from flexkv.cluster.publisher import Publisher
from flexkv.cluster.settings import ClusterSettings, check_node
from flexkv.cluster.wire import NodeRecord
from flexkv.events import EventStream
from flexkv.telemetry import Telemetry, log

_LEAVE_S = 1.0


class Directory:
    """One node's side of the directory on Redis.

    `record.epoch` is that of the last reset of the cluster that what this node holds has seen; when
    the cluster is further, `on_reset(epoch)` is awaited, which must drop everything, before
    anything else is published or served. A server that is down costs nothing but news.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        record: NodeRecord,
        events: EventStream,
        holdings: Books,
        now: Callable[[], float],
        telemetry: Telemetry,
        *,
        on_reset: Callable[[int], Awaitable[Any]] | None = None,
    ) -> None:
        check_node(record.node)
        self._on_reset = on_reset
        self._wanted_state: Literal["up", "draining"] | None = None
        self._publisher = Publisher(settings, record, events, now, telemetry, self._told)
        self._follower = Follower(settings, self._publisher, holdings, now, telemetry)
        telemetry.gauge("directory_connected", lambda: self.connected)
        telemetry.gauge("directory_nodes", lambda: len(self.nodes()))
        for name, link in {"publish": self._publisher.link, "follow": self._follower.link}.items():
            telemetry.gauge("directory_sent_bytes", _reader(link, "sent_bytes"), link=name)
            telemetry.gauge("directory_received_bytes", _reader(link, "received_bytes"), link=name)
            telemetry.gauge("directory_commands", _reader(link, "commands"), link=name)

    @property
    def epoch(self) -> int:
        """The last reset of the cluster that this node has carried out."""
        return self._publisher.record.epoch

    @property
    def connected(self) -> bool:
        """Whether the server answered the last time."""
        return self._publisher.connected

    @property
    def record(self) -> NodeRecord:
        """What this node says of itself."""
        return self._publisher.record

    def nodes(self) -> Mapping[str, NodeRecord]:
        """Return the other nodes, by name, as they were last seen."""
        return {peer.record.node: peer.record for _, peer in self._follower.live()}

    def address(self, number: int, courier: str) -> str | None:
        """Return where a node of holdings number `number` is reached; None when it is gone."""
        for _, peer in self._follower.live():
            if peer.number == number:
                return peer.record.addresses.get(courier)
        return None

    def drain(self, wanted: bool = True) -> None:
        """Tell everybody that this node is about to leave (or stays after all)."""
        self._wanted_state = "draining" if wanted else None
        self._publisher.hurry()

    def move(self, courier: str, address: str) -> None:
        """Tell everybody where a courier of this node is reached from now on; "": nowhere."""
        self._publisher.move(courier, address)
        self._publisher.hurry()

    def start_over(self) -> None:
        """Read all that others hold again: the books were emptied (a local reset)."""
        self._follower.start_over()

    async def run(self) -> None:
        """Publish and follow until cancelled, then take this node off the server."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._publisher.run)
                group.start_soon(self._follower.run)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_LEAVE_S):
                await self._publisher.leave()
            await self._publisher.link.aclose()
            await self._follower.link.aclose()

    async def _told(self, beat: Beat) -> None:
        """Act on what a heartbeat says."""
        if beat.epoch > self.epoch:
            log.warning("directory.reset", epoch=beat.epoch, before=self.epoch)
            self._follower.forget()
            if self._on_reset is not None:
                await self._on_reset(beat.epoch)
            self._follower.forget()  # what was read meanwhile
            self._publisher.restart(msgspec.structs.replace(self.record, epoch=beat.epoch))
            return
        state = "draining" if beat.drain or self._wanted_state else "up"
        if state != self.record.state:
            self._publisher.mark(state)
        self._follower.heard(beat.members)


def _reader(link: Any, name: str) -> Callable[[], float]:
    return lambda: float(getattr(link, name))
