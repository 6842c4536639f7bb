"""What people ask of a cluster: `status`, `nodes`, `drain`, `reset`. They talk to the server only.

`Admin` is for one command: open it, ask, close it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import anyio

from flexkv.cluster.beat import number_of
from flexkv.cluster.redisclient import Link
from flexkv.cluster.settings import ClusterSettings, Names, check_node, is_member, member_of
from flexkv.cluster.wire import NodeRecord, WireError, decode_record
from flexkv.errors import InputError

_LOOK_AGAIN_S = 0.05


class Admin:
    """A connection to the directory of one cluster, for commands.

    Every verb raises LinkError when the server does not answer.
    """

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings, self._names = settings, Names(settings)
        self._link = Link(settings)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._link.aclose()

    async def nodes(self) -> list[NodeRecord]:
        """Return the records of nodes that are alive, by name."""
        records, _ = await self._records()
        return records

    async def status(self) -> dict[str, Any]:
        """Return the cluster's epoch, its nodes and what the directory takes on the server."""
        records, invalid = await self._records()
        names, link = self._names, self._link
        epoch = number_of(await link.ask("ZSCORE", names.epoch, "epoch"))
        size = messages = 0
        for record in records:
            member = _member(record)
            log = names.log(member, record.generation)
            snapshot = names.snapshot(member, record.generation, record.snapshot)
            answers = await link.ask_all(
                [("MEMORY", "USAGE", log), ("MEMORY", "USAGE", snapshot), ("XLEN", log)]
            )
            size += (answers[0] or 0) + (answers[1] or 0)
            messages += answers[2]
        return {
            "cluster": self._settings.name,
            "epoch": epoch,
            "nodes": len(records),
            "draining": sum(record.state == "draining" for record in records),
            "behind": sum(record.epoch != epoch for record in records),
            "blocks": sum(record.blocks for record in records),
            "identities": len({record.identity for record in records}),
            "invalid_records": invalid,
            "log_messages": messages,
            "server_bytes": size,
        }

    async def drain(self, node: str, *, undo: bool = False) -> None:
        """Ask a node to get ready to leave: others go on reading from it, and copy what they use.

        It is said to the node's present life; what is started anew under its name is not draining.

        Raises:
            InputError: there is no such node.
        """
        check_node(node)
        records, names = await self.nodes(), self._names
        lives = {_member(record) for record in records if record.node == node}
        if not lives:
            known = ", ".join(sorted(record.node for record in records))
            raise InputError(f"no node {node!r} is alive; there are: {known or 'none'}")
        marked = {text.decode() for text in await self._link.ask("SMEMBERS", names.draining)}
        gone = marked - {_member(record) for record in records}
        if undo:
            gone |= lives
        commands = [("SREM", names.draining, *gone)] if gone else []
        if not undo:
            commands.append(("SADD", names.draining, *lives))
        await self._link.ask_all(commands)

    async def reset(
        self, timeout_ms: float, progress: Callable[[int, int], None] = lambda done, of: None
    ) -> dict[str, Any]:
        """Begin a new epoch; wait until every node alive has dropped all it held before.

        Returns the epoch, how many nodes have carried it out, and the names of those who have not
        within `timeout_ms`. They do before they publish or serve anything again.
        """
        names, link = self._names, self._link
        epochs = {record.epoch for record in await self.nodes()}
        epoch = max(number_of(await link.ask("ZSCORE", names.epoch, "epoch")), *epochs, 0) + 1
        waiting = await self._members()
        of = len(waiting)
        await link.ask_all(
            [
                ("ZADD", names.epoch, "GT", epoch, "epoch"),
                ("XADD", names.roster, "MAXLEN", "~", 1024, "*", "epoch", epoch),
            ]
        )
        # a member without a record is dead, or about to write it anew
        patience = anyio.current_time() + 2 * self._settings.heartbeat_ms / 1e3
        with anyio.move_on_after(timeout_ms / 1e3):
            while waiting:
                found = {_member(record): record.epoch for record in await self.nodes()}
                here = await self._members()
                if anyio.current_time() > patience:
                    here &= set(found)
                waiting = {member for member in waiting & here if found.get(member, -1) < epoch}
                progress(of - len(waiting), of)
                if waiting:
                    await anyio.sleep(_LOOK_AGAIN_S)
        done = sum(record.epoch >= epoch for record in await self.nodes())
        nodes = sorted(member.rpartition("/")[0] for member in waiting)
        return {"epoch": epoch, "done": done, "waiting": nodes}

    async def _members(self) -> set[str]:
        members = await self._link.ask("ZRANGE", self._names.members, 0, -1)
        texts = (member.decode("ascii", "replace") for member in members)
        return {text for text in texts if is_member(text)}

    async def _records(self) -> tuple[list[NodeRecord], int]:
        """Valid records, by name, and how many are not."""
        members = await self._link.ask("ZRANGE", self._names.members, 0, -1)
        texts = [member.decode("ascii", "replace") for member in members]
        wanted = [("GET", self._names.record(text)) for text in texts if is_member(text)]
        found, invalid = [], len(texts) - len(wanted)
        for data in await self._link.ask_all(wanted) if wanted else ():
            if data is not None:
                try:
                    found.append(decode_record(data))
                except WireError:
                    invalid += 1
        return sorted(found, key=lambda record: (record.node, record.incarnation)), invalid


def _member(record: NodeRecord) -> str:
    return member_of(record.node, record.incarnation)
