"""Builds what a manager owns, from its configuration: brain, body and backends, wired together.

`Stack` (the parts) - `build` (open them all, or close what was opened and raise) - `Stack.aclose`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio.to_thread

from flexkv import plugins, tiercodec
from flexkv.background import Discarder, Spiller
from flexkv.brain import Brain, brain_for
from flexkv.cluster.lender import Promote
from flexkv.cluster.member import Member
from flexkv.completion import Completions
from flexkv.config import FlexKVConfig
from flexkv.encodedstore import EncodedStore
from flexkv.engine import Commit, Engine
from flexkv.errors import ConfigError, FlexKVError
from flexkv.events import EventLog
from flexkv.index import PrefixIndex
from flexkv.keys import Keyring
from flexkv.lanes import Staging
from flexkv.ledger import Ledger
from flexkv.memory import Arena
from flexkv.model import DISK, HOST, PEER, REMOTE, KVSpec
from flexkv.planner import Planner
from flexkv.plans import Plans
from flexkv.protocols import DeviceBackend, Recovered, Services, StorageBackend
from flexkv.telemetry import Telemetry, log
from flexkv.traces.recording import Recorder, unused
from flexkv.worth import Worth

ASKED_AGAIN_S = 1.0  # engines ask in every step, for a request that has to wait


@dataclass(frozen=True, slots=True)
class Stack:
    """The parts of an open manager."""

    spec: KVSpec
    keyring: Keyring
    completions: Completions
    arena: Arena
    device: DeviceBackend
    index: PrefixIndex
    ledger: Ledger
    planner: Planner
    plans: Plans
    engine: Engine
    spiller: Spiller
    discarder: Discarder
    events: EventLog
    member: Member | None
    worth: Worth | None
    closer: AsyncExitStack

    def usage(self, *, transfers: int) -> dict[str, dict[str, int]]:
        """Blocks per tier: capacity, free, resident (readable or landing), evicted so far; what is
        open under "manager".
        """
        tiers = {
            tier.name: {
                "capacity": tier.capacity,
                "free": tier.free,
                "resident": self.index.resident(tier.number),
                "evicted": tier.evicted_blocks,
            }
            for tier in self.ledger.tiers.values()
        }
        manager = {
            "plans": len(self.plans),
            "transfers": transfers,
            "pinned": self.index.pinned,
            "entries": len(self.index),
            "spilling": self.spiller.queued_blocks,
            "tickets": self.completions.in_flight,
        }
        return tiers | {"manager": manager}

    def observe(self, telemetry: Telemetry) -> None:
        """Offer what is best read when somebody looks."""
        gauge = telemetry.gauge
        for tier in self.ledger.tiers.values():
            gauge("tier_capacity_blocks", partial(getattr, tier, "capacity"), tier=tier.name)
            gauge("tier_free_blocks", partial(getattr, tier, "free"), tier=tier.name)
        for lane in self.engine.lanes.values():
            gauge("lane_bytes_in_flight", partial(getattr, lane, "in_flight"), lane=lane.name)
            gauge("lane_queue_depth", partial(getattr, lane, "waiting"), lane=lane.name)
        hints = self.ledger.hints
        gauge("hints", lambda: len(hints))
        gauge("dropped_hint_blocks", lambda: hints.dropped)
        for name in self.ledger.tiers:
            gauge("hinted_blocks", partial(hints.count, name, "hinted"), tier=name)
            gauge("held_blocks", partial(hints.count, name, "held"), tier=name)
        if (worth := self.worth) is not None:
            for name in worth.tiers:
                gauge("fetch_bytes_per_s", partial(worth.bytes_per_s, name), tier=name)
                gauge("fetch_latency_seconds", partial(worth.latency_s, name), tier=name)
            gauge("prefill_tokens_per_s", worth.tokens_per_s)
            gauge("fetch_probes", lambda: worth.probes)
        if self.member is not None:
            self.member.observe(telemetry)
        gauge("spill_queue_blocks", lambda: self.spiller.queued_blocks)
        gauge("index_blocks", lambda: len(self.index))
        gauge("pinned_blocks", lambda: self.index.pinned)
        gauge("tickets_in_flight", lambda: self.completions.in_flight)

    async def take_part(self, promote: Promote, reset: Callable[[], Awaitable[None]]) -> None:
        """Take part in the cluster, if there is one, until cancelled; see `Member.run`."""
        if self.member is not None:
            await self.member.run(promote, reset)

    async def unlent(self) -> None:
        """Wait until nothing is with readers on other nodes; nobody gets anything from now on."""
        if self.member is not None:
            await self.member.drained()

    def lend(self) -> None:
        """Let other nodes read again."""
        if self.member is not None:
            self.member.resume()

    async def aclose(self) -> None:
        """Close backends, completions and arena, in this order."""
        await self.closer.aclose()


async def build(config: FlexKVConfig, telemetry: Telemetry, commit: Commit) -> Stack:
    """Open everything a manager needs; on failure close what was opened.

    Raises:
        ConfigError, PluginError, StorageError, CapacityError: as the parts say.
    """
    if config.spec is None:
        raise ConfigError(
            "spec is not set: say what a block holds, for example "
            "FlexKVConfig(spec=KVSpec.uniform(layers=32, heads=8, head_size=128, dtype='bfloat16'))"
        )
    async with AsyncExitStack() as closer:
        stack = await _open(config, config.spec, telemetry, commit, closer)
        closer.pop_all()  # from here on the stack's own closer is responsible
    return stack


async def _open(
    config: FlexKVConfig, spec: KVSpec, telemetry: Telemetry, commit: Commit, guard: AsyncExitStack
) -> Stack:
    closer = await guard.enter_async_context(AsyncExitStack())
    identity, host_slots = tiercodec.identities(config, spec), config.host_slots(spec)
    chunk_blocks, staging_slots = config.chunk_blocks(spec), config.staging_slots(spec)
    arena, completions = await _open_memory(config, spec, host_slots + staging_slots, closer)
    services = Services(
        completions, arena, identity.keys, config.backend_settings("device"), host_slots
    )
    device: DeviceBackend = plugins.load(plugins.BACKENDS, config.device)()
    await device.open(services)
    closer.push_async_callback(device.aclose)
    stores: dict[str, StorageBackend] = {}
    recovered: dict[str, Recovered] = {}
    for tier, capacity in tiercodec.store_slots(config, spec).items():
        store = _make_store(config, tier)
        settings, whose = config.backend_settings(tier), getattr(identity, tier)
        found = await store.open(Services(completions, arena, whose, settings, capacity))
        closer.push_async_callback(store.aclose)
        stores[tier] = store
        if found is not None:
            recovered[tier] = found
    keyed = [tier for tier, store in stores.items() if store.addressing == "key"]
    brain = brain_for(config, spec, partial(_count_evicted, telemetry), keyed)
    ledger, planner = brain.ledger, brain.planner
    events = _events(config, ledger, telemetry)
    closer.callback(events.close)
    member = await _join(config, brain, services, events, stores, telemetry, closer)
    engine = Engine(
        completions,
        device,
        stores,
        Staging(staging_slots, host_slots),
        block_bytes=spec.block_bytes,
        chunk_blocks=chunk_blocks,
        lane_bytes=config.device_bytes_in_flight,
        ops_in_flight=8,
        commit=commit,
        telemetry=telemetry,
        worth=brain.worth,
    )
    queue = {"queue_blocks": config.spill_queue_blocks, "batch_blocks": chunk_blocks}
    spiller = Spiller(planner, engine, telemetry, **queue)
    for name, found in recovered.items():
        kept = ledger.restore(ledger.tiers[name], found, completions.now())
        log.info("tier.restored", tier=name, blocks=kept, orphans=len(found.slots) - kept)
    if config.trace_path is not None:
        recorder = Recorder(telemetry, spec.tokens_per_block, repeats_s=ASKED_AGAIN_S)
        closer.push_async_callback(_save, recorder, config.trace_path)
    return Stack(
        spec,
        Keyring(identity.keys, config.secret_bytes()),
        completions,
        arena,
        device,
        ledger.index,
        ledger,
        planner,
        Plans(brain, completions, telemetry, spec.tokens_per_block, config.plan_ttl_ms),
        engine,
        spiller,
        Discarder(ledger, stores),
        events,
        member,
        brain.worth,
        closer,
    )


def _events(config: FlexKVConfig, ledger: Ledger, telemetry: Telemetry) -> EventLog:
    """The log of what becomes readable in our own tiers."""
    dropped = partial(telemetry.add, "dropped_blocks", work="events")
    own = [HOST, *(store.name for store in ledger.stores)]
    return EventLog(ledger.index, config.event_queue_blocks, dropped, own)


async def _join(
    config: FlexKVConfig,
    brain: Brain,
    services: Services,
    events: EventLog,
    stores: dict[str, StorageBackend],
    telemetry: Telemetry,
    closer: AsyncExitStack,
) -> Member | None:
    """Make this node a member of its cluster, if there is one, and the others' blocks a store."""
    if config.cluster_redis_url is None:
        return None
    remote, courier = stores.get(REMOTE), None
    if config.cluster_courier == "mooncake":
        from flexkv.cluster.mooncake_courier import MooncakeCourier

        size, options = services.identity.spec.block_bytes, config.cluster_options.get("courier")
        courier = MooncakeCourier(services.arena, size, options)
    member = Member(
        config,
        brain.planner,
        services,
        events.listen(),
        telemetry,
        remote=remote,
        courier=courier,
    )
    closer.push_async_callback(member.aclose)
    await member.open()
    stores[PEER] = member.store
    return member


async def _save(recorder: Recorder, path: Path) -> None:
    """Write what was recorded beside what is there, off the loop."""
    recorder.stop()
    try:
        target = unused(path)
        await anyio.to_thread.run_sync(recorder.save, target)
    except FlexKVError as error:
        log.warning("trace.lost", requests=len(recorder), error=str(error))
    else:
        log.info("trace.saved", path=str(target), requests=len(recorder), lost=recorder.lost)


def _make_store(config: FlexKVConfig, tier: str) -> StorageBackend:
    store: StorageBackend = plugins.load(plugins.BACKENDS, config.store_plugin(tier))()
    codec = tiercodec.disk_codec(config) if tier == DISK else None
    return store if codec is None else EncodedStore(store, codec, config.disk_codec_bytes)


async def _open_memory(
    config: FlexKVConfig, spec: KVSpec, slots: int, closer: AsyncExitStack
) -> tuple[Arena, Completions]:
    """Open arena and completions; the arena outlives whatever may still write to it."""
    make_arena = partial(
        Arena, slots, spec.stride_bytes, huge_pages=config.huge_pages, prefault=config.prefault
    )
    # only touching the pages takes time
    arena = await anyio.to_thread.run_sync(make_arena) if config.prefault else make_arena()
    completions = Completions(
        tickets=config.tickets,
        crew_threads=config.crew_threads or None,
        crew_queue=config.crew_queue,
    )

    async def close() -> None:
        stayed_out = await completions.aclose(config.close_timeout_ms)
        if stayed_out:
            reason = "hardware may still write to the arena"
            log.error("close.leaked", tickets=stayed_out, reason=reason)
        else:
            arena.close()

    closer.push_async_callback(close)
    return arena, completions


def _count_evicted(telemetry: Telemetry, tier: str, count: int) -> None:
    telemetry.add("evicted_blocks", count, tier=tier)
