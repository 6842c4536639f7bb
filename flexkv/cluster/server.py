"""The owner's door: `PeerServer` lets readers of the same deployment in and serves their requests.

`bind` (listen: the address is known from then on) - `run` (serve until cancelled) - `cut` (end all
connections, before everything is forgotten). Verbs of the wire: lease (and read),
release. Whoever does
not know the deployment's secret, speaks another version or asks for blocks of another identity
gets nothing; requests for another incarnation or epoch are refused.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

import anyio
import numpy as np

from flexkv.cluster import peerwire as wire
from flexkv.cluster import tcp
from flexkv.cluster.blocks import Passage
from flexkv.cluster.leases import Token
from flexkv.cluster.lender import Lender, Loan
from flexkv.errors import FlexKVError
from flexkv.memory import Arena
from flexkv.model import Identity
from flexkv.telemetry import log

_JOIN_S = 5.0  # for a stranger to prove itself
_LONGEST_S = 60.0  # that a reader may wait for a lease
_SENDERS = 2  # threads that send blocks
_MOST_CONNECTIONS = 256
_NO_SUMS = np.empty(0, np.uint64)


class PeerServer:
    """Serves the blocks of one node.

    Args:
        node: our name.
        identity: what our blocks are; readers of others are turned away.
        epoch: says the cluster's epoch, as we know it now.
        secret: of the deployment; empty: everybody is let in.
    """

    def __init__(
        self,
        lender: Lender,
        arena: Arena,
        *,
        node: str,
        identity: Identity,
        block_bytes: int,
        epoch: Callable[[], int],
        secret: bytes = b"",
    ) -> None:
        self._lender, self._arena = lender, arena
        self._node, self._identity, self._block_bytes = node, identity.digest(), block_bytes
        self._epoch, self._handshake = epoch, wire.Handshake(secret)
        self._threads = anyio.CapacityLimiter(_SENDERS)
        self._wires: set[tcp.Wire] = set()
        self._listener: socket.socket | None = None
        self.strangers = 0  # connections that were turned away, so far
        self.sent_blocks = 0

    def bind(self, address: str = "127.0.0.1:0") -> str:
        """Listen at "host:port" (port 0: any); returns where.

        Raises:
            ConfigError: the address cannot be used.
        """
        host, port = tcp.parse(address)
        self._listener = tcp.listen_at(host, port)
        return tcp.written(*self._listener.getsockname()[:2])

    async def run(self) -> None:
        """Let readers in until cancelled."""
        listener = self._listener
        assert listener is not None, "bind comes first"
        try:
            async with anyio.create_task_group() as group:
                while True:
                    await anyio.wait_readable(listener)
                    with contextlib.suppress(OSError):  # whoever it was has gone, or no descriptor
                        connection, _ = listener.accept()
                        if len(self._wires) >= _MOST_CONNECTIONS:
                            connection.close()
                        else:
                            group.start_soon(self._serve, tcp.Wire(connection, self._threads))
        finally:
            listener.close()

    def cut(self) -> None:
        """End all connections; blocks that are being sent are given back when that has stopped."""
        for link in self._wires:
            link.cut()

    # --- one connection

    async def _serve(self, link: tcp.Wire) -> None:
        self._wires.add(link)
        try:
            with anyio.fail_after(_JOIN_S):
                reader = await self._let_in(link)
            while reader:
                request = wire.unpack_for_owner(await link.receive())
                await self._answer(link, reader, request)
        except (OSError, EOFError) as error:  # TimeoutError among them
            log.debug("peer.gone", peer=link.peer, error=repr(error))
        except wire.ProtocolError as error:
            log.warning("peer.strange", peer=link.peer, error=str(error))
        except Exception as error:  # ours: it ends this connection, not the node
            log.error("peer.broken", peer=link.peer, error=repr(error))
        finally:
            self._wires.discard(link)
            link.close()

    async def _let_in(self, link: tcp.Wire) -> str:
        """Hear who it is and answer; returns its name, "" for one who has no business here."""
        ours = self._handshake.nonce()
        await link.send(wire.pack(wire.Challenge(wire.PROTOCOL_VERSION, ours)))
        hello = wire.unpack_for_owner(await link.receive())
        if not isinstance(hello, wire.Hello):
            raise wire.ProtocolError(f"{type(hello).__name__} came before Hello")
        facts = (ours, hello.nonce, hello.identity, hello.node.encode())
        why = ""
        if hello.version != wire.PROTOCOL_VERSION:
            why = f"version {hello.version}"
        elif not self._handshake.holds(hello.proof, "reader", *facts):
            why = "another secret"
        elif hello.identity != self._identity or hello.block_bytes != self._block_bytes:
            why = "another identity"
        if why:
            self.strangers += 1
            log.warning("peer.refused", peer=link.peer, why=why)
            return ""
        welcome = wire.Welcome(
            wire.PROTOCOL_VERSION,
            self._node,
            self._lender.leases.incarnation,
            self._epoch(),
            self._arena.base,
            self._arena.stride_bytes,
            self._handshake.prove("owner", *facts, self._node.encode()),
        )
        await link.send(wire.pack(welcome))
        return hello.node

    async def _answer(self, link: tcp.Wire, reader: str, request: wire.ToOwner) -> None:
        if isinstance(request, wire.Hello):
            raise wire.ProtocolError("Hello came twice")
        if why := self._unfit(request):
            await link.send(wire.pack(wire.Refusal(request.request, why)))
        elif isinstance(request, wire.Lease):
            await self._lease(link, reader, request)
        else:
            tokens = [Token(request.incarnation, number) for number in request.tokens]
            sums = await self._lender.proof(tokens[0]) if len(tokens) == 1 else _NO_SUMS
            released = self._lender.release(tokens)
            proven = sums.astype("<u8").tobytes() if all(released) else b""
            answer = wire.Released(request.request, released, proven)
            await link.send(wire.pack(answer))

    def _unfit(self, request: wire.Lease | wire.Release) -> wire.Why | None:
        if request.incarnation != self._lender.leases.incarnation:
            return "incarnation"
        return "epoch" if request.epoch != self._epoch() else None

    async def _lease(self, link: tcp.Wire, reader: str, request: wire.Lease) -> None:
        keys = wire.keys_from_bytes(request.keys)
        limit_s = min(request.deadline_ms / 1e3, _LONGEST_S)
        try:
            loan = await self._lender.lend(reader, keys, limit_s)
        except FlexKVError as error:
            log.debug("peer.busy", reader=reader, error=str(error))
            await link.send(wire.pack(wire.Refusal(request.request, "busy")))
            return
        if loan.lease is not None and request.read:
            await self._send(link, request, loan)
            return
        await link.send(self._leased(request, loan))
        if loan.lease is not None:  # while the reader pulls them; it asks for that afterwards
            await self._lender.proof(loan.lease.token)

    async def _send(self, link: tcp.Wire, request: wire.Lease, loan: Loan) -> None:
        """Send the blocks of a lease, which stay where they are until that has ended.

        Raises:
            TimeoutError: the reader takes longer than a lease lasts.
        """
        table, lease = self._lender.leases, loan.lease
        assert lease is not None
        table.begin(lease.token, self._lender.now())
        try:
            passage = Passage(self._arena, loan.slots, loan.keys, self._block_bytes)
            with anyio.fail_after(table.ttl_s):
                await link.send(self._leased(request, loan))
                await link.send_blocks(passage)
            self.sent_blocks += len(loan.slots)
        finally:
            self._take_back(loan)
            table.end(lease)

    def _take_back(self, loan: Loan) -> None:
        if loan.lease is not None:
            self._lender.release([loan.lease.token])

    def _leased(self, request: wire.Lease, loan: Loan) -> bytes:
        return wire.pack(
            wire.Leased(
                request.request,
                loan.lease.token.number if loan.lease else 0,
                int(self._lender.leases.ttl_s * 1e3),
                loan.statuses.tobytes(),
                loan.slots.astype("<u4").tobytes(),
            )
        )
