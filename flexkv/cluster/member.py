"""A manager's part in a cluster: what ties holdings, directory, lender, server and store together.

`Member.open` (listen; the store is ready) - `run` (in the manager's task group: publish, follow,
lend) - `drained` (nothing of ours is with readers), `resume` - `aclose`. Whatever breaks here ends
this node's part in the cluster, never its own service.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Literal

import anyio

from flexkv.cluster import tcp
from flexkv.cluster.directory import Directory
from flexkv.cluster.epochs import EpochFile
from flexkv.cluster.fetching import Courier, PeerSettings
from flexkv.cluster.holdings import Holdings
from flexkv.cluster.lender import Lender, Promote
from flexkv.cluster.peers import PeerStore
from flexkv.cluster.server import PeerServer
from flexkv.cluster.settings import ClusterSettings
from flexkv.cluster.wire import NodeRecord
from flexkv.config import FlexKVConfig
from flexkv.errors import CapacityError, ClosedError, ConfigError, StalledError
from flexkv.events import EventStream
from flexkv.model import PEER, BlockIds, KeyArray
from flexkv.planner import Planner
from flexkv.protocols import Services, StorageBackend
from flexkv.telemetry import Telemetry, log
from flexkv.transfer import Transfer

_AGAIN_S = 0.05
_EVERYWHERE = ("0.0.0.0", "::")


class Member:
    """One node of a cluster. It is also what the peer store knows of the others.

    Args:
        services: those of the manager; the store is opened with them.
        remote: the store that all nodes share, if this one has it.
        courier: what carries blocks instead of plain TCP.
    """

    def __init__(
        self,
        config: FlexKVConfig,
        planner: Planner,
        services: Services,
        events: EventStream,
        telemetry: Telemetry,
        *,
        remote: StorageBackend | None = None,
        courier: Courier | None = None,
    ) -> None:
        self._config, self._services, self._courier = config, services, courier
        self._settings, self._peers, self._events = *_settings(config), events
        self._telemetry = telemetry
        self.node = config.node_name or _name()
        self.incarnation_number = secrets.randbits(63)
        self.holdings = Holdings(planner.ledger, planner.ledger.tiers[PEER], own_node=self.node)
        self._promote: Promote | None = None
        self._reset: Callable[[], Awaitable[None]] | None = None
        spec = services.identity.spec
        secret = config.secret_bytes()
        self.lender = Lender(
            planner,
            services.completions,
            services.arena,
            incarnation=self.incarnation_number,
            block_bytes=spec.block_bytes,
            promote=self._bring if planner.ledger.stores else None,
            ttl_s=config.lease_ms / 1e3,
            bytes_in_flight=config.peer_bytes_in_flight,
        )
        self.server = PeerServer(
            self.lender,
            services.arena,
            node=self.node,
            identity=services.identity,
            block_bytes=spec.block_bytes,
            epoch=lambda: self.epoch,
            secret=secret,
        )
        self.store = PeerStore(
            self.holdings,
            self,
            node=self.node,
            secret=secret,
            remote=remote,
            courier=courier,
            settings=self._peers,
        )
        folder = config.disk_dirs[0] if config.disk_cache_bytes else None
        self._epoch_file = EpochFile(folder, f"{config.cluster_prefix}:{config.cluster_name}")
        self._directory: Directory | None = None

    async def open(self) -> None:
        """Listen for readers, so that the others can be told where; the server of the directory is
        not asked for anything yet.

        Raises:
            ConfigError: the address cannot be used.
        """
        config, completions = self._config, self._services.completions
        bound = self.server.bind(config.cluster_listen)
        addresses = {"tcp": _advertised(config, self._settings, bound)}
        if self._courier is not None:
            host, _ = tcp.parse(addresses["tcp"])
            addresses[self._courier.name] = await self._courier.lend(host)
        await self.store.open(self._services)
        record = NodeRecord(
            node=self.node,
            incarnation=self.incarnation_number,
            epoch=await self._epoch_file.read(),
            identity=self._services.identity.digest(),
            addresses=addresses,
        )
        self._directory = Directory(
            self._settings,
            record,
            self._events,
            self.holdings,
            completions.now,
            self._telemetry,
            on_reset=self._on_reset,
        )
        log.info("cluster.member", node=self.node, cluster=config.cluster_name, **addresses)

    @property
    def directory(self) -> Directory:
        """The directory, once it is open."""
        assert self._directory is not None, "open comes first"
        return self._directory

    # what the store knows of the others

    @property
    def epoch(self) -> int:
        """The last reset of the cluster that this node has carried out."""
        return 0 if self._directory is None else self._directory.epoch

    def address(self, number: int, courier: str) -> str | None:
        """Return where a node's courier listens, None when it is gone."""
        return self.directory.address(number, courier)

    def incarnation(self, number: int) -> int | None:
        """Return which life of a node its holdings are of, None when it is gone."""
        name = self.holdings.name(number)
        return None if name is None else int(name.rpartition("/")[2], 16)

    # life

    async def run(self, promote: Promote, reset: Callable[[], Awaitable[None]]) -> None:
        """Take part until cancelled.

        Args:
            promote: brings blocks of ours from disk into the host.
            reset: forgets everything here.
        """
        self._promote, self._reset = promote, reset
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            "directory": self.directory.run,
            "server": self.server.run,
        }
        if self._courier is not None:
            moved = partial(self.directory.move, self._courier.name)
            parts["courier"] = partial(self._courier.watch, moved)
        async with anyio.create_task_group() as group:
            for name, part in parts.items():
                group.start_soon(self._guarded, name, part)

    async def _guarded(self, name: str, part: Callable[[], Awaitable[None]]) -> None:
        try:
            await part()
        except Exception as error:  # ours: it ends our part in the cluster, not the node's service
            log.error("cluster.broken", part=name, error=repr(error), exc_info=error)
            self._telemetry.add("cluster_failures", 1, part=name)
            self.lender.close()
            for number in [self.holdings.join(node) for node in self.holdings.nodes()]:
                self.holdings.leave(number)

    def _bring(self, blocks: BlockIds, keys: KeyArray) -> Transfer:
        if self._promote is None:
            raise ClosedError("this node does not lend yet")
        return self._promote(blocks, keys)

    async def _on_reset(self, epoch: int) -> None:
        """Forget everything, as the whole cluster does; whatever is under way is over first."""
        while self._reset is not None:
            try:
                await self._reset()
            except (CapacityError, StalledError) as error:  # another reset; something that hangs
                log.warning("cluster.reset_waits", epoch=epoch, error=str(error))
                await anyio.sleep(_AGAIN_S)
            else:
                return await self._epoch_file.write(epoch)

    async def drained(self) -> None:
        """Stop lending and wait until nothing of ours is with readers."""
        self.lender.accepts = False
        self.lender.revoke()
        self.server.cut()
        await self.lender.drained()

    def resume(self) -> None:
        """Lend again after a reset of this node, and learn again what the others hold."""
        self.lender.accepts = True
        self.directory.start_over()

    async def aclose(self) -> None:
        """Give up connections and leases."""
        self.lender.close()
        self._events.close()
        await self.store.aclose()

    def observe(self, telemetry: Telemetry) -> None:
        """Offer what is best read when somebody looks."""
        gauge, holdings = telemetry.gauge, self.holdings
        gauge("peer_nodes", lambda: sum(1 for blocks in holdings.nodes().values() if blocks))
        for reason in ("orphans", "overflowed", "crowded"):
            gauge("peer_unknown_blocks", partial(getattr, holdings, reason), reason=reason)
        for status in ("landed", "missing", "failed", "damaged", "skipped"):
            gauge("peer_read_blocks", partial(self.store.blocks.__getitem__, status), status=status)
        gauge("peer_requests", lambda: self.store.requests)
        gauge("peer_fallback_blocks", lambda: self.store.fallback_blocks)
        gauge("peer_sent_blocks", lambda: self.server.sent_blocks)
        gauge("peer_strangers", lambda: self.server.strangers)
        gauge("peer_leases", lambda: len(self.lender.leases))


def _name() -> str:
    """A name that no other node has: host, process, and a random part."""
    host = "".join(c if c.isalnum() or c in "._-" else "-" for c in socket.gethostname())
    return f"{host or 'node'}-{os.getpid()}-{secrets.token_hex(3)}"


def _settings(config: FlexKVConfig) -> tuple[ClusterSettings, PeerSettings]:
    """The settings of the directory and of reads from peers.

    Raises:
        ConfigError: an option is not known or cannot be used.
    """
    url = config.cluster_redis_url
    assert url is not None, "there is no cluster"
    options: Mapping[Literal["directory", "peers"], Any] = {
        name: dict(config.cluster_options.get(name, {})) for name in ("directory", "peers")
    }
    unknown = set(config.cluster_options) - {*options, "courier"}
    if unknown:
        raise ConfigError(
            f"cluster_options has parts directory, peers and courier, not {sorted(unknown)}"
        )
    try:
        directory = ClusterSettings(
            url=url.get_secret_value(),
            username=config.cluster_username,
            password_file=str(config.cluster_password_file or ""),
            prefix=config.cluster_prefix,
            name=config.cluster_name,
            heartbeat_ms=config.heartbeat_ms,
            node_ttl_ms=config.node_ttl_ms,
            **options["directory"],
        )
        peers = PeerSettings(timeout_ms=config.peer_timeout_ms, **options["peers"])
    except TypeError as error:
        raise ConfigError(f"cluster_options: {error}") from error
    return directory, peers


def _advertised(config: FlexKVConfig, settings: ClusterSettings, bound: str) -> str:
    """Where the others reach what is bound here."""
    host, port = tcp.parse(bound)
    wanted = config.cluster_advertise
    if wanted and ":" in wanted.rpartition("]")[2]:
        return wanted
    if wanted:
        return tcp.written(wanted.strip("[]"), port)
    return tcp.written(_own_address(settings) if host in _EVERYWHERE else host, port)


def _own_address(settings: ClusterSettings) -> str:
    """The address of this machine on the way to the directory's server; nothing is sent."""
    found = settings.places()
    servers = found.get("sentinels") or found.get("nodes") or [(found.get("host"), 1)]
    host = servers[0][0] or "127.0.0.1"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            own: str = probe.getsockname()[0]
            return own
    except OSError:
        return socket.gethostname()
