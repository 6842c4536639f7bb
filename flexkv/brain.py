"""The brain in one piece: index, tiers, ledger and planner, built from plain values.

`build_brain`, or `brain_for` a configuration, is what the manager's stack calls and what the
simulator calls: both decide with the same objects, so that their hits, evictions and bytes are
equal. Synchronous and deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from flexkv import plugins
from flexkv.config import FlexKVConfig
from flexkv.hints import RetainLimits
from flexkv.index import PrefixIndex
from flexkv.ledger import Ledger, PromoteMode, SpillMode
from flexkv.model import HOST, PEER, REMOTE, KVSpec
from flexkv.planner import Planner
from flexkv.pool import SlotPool
from flexkv.tier import Tier
from flexkv.tiercodec import store_slots
from flexkv.worth import Worth, WorthLimits

_SPARE_ENTRIES = 1024  # blocks that are pinned or interior while they are in no tier


@dataclass(frozen=True, slots=True)
class Brain:
    """What decides: where blocks are (`ledger`, over `index` and tiers), what moves (`planner`),
    what that takes and whether it is worth it (`worth`; None: always).
    """

    index: PrefixIndex
    ledger: Ledger
    planner: Planner
    worth: Worth | None = None


def _uncounted(tier: str, count: int) -> None:
    """Count nothing."""


def build_brain(
    capacities: Mapping[str, int],
    policy_of: Callable[[str], str],
    settings: Mapping[str, Any] | None = None,
    *,
    tokens_per_block: int,
    evict_ratio: float = 0.0,
    evict_start_threshold: float = 1.0,
    spill: SpillMode = "through",
    max_read_failures: int = 3,
    retain: RetainLimits | None = None,
    promote: PromoteMode = "always",
    chunk_blocks: int = 1,
    chunks_in_flight: int = 1,
    count_evicted: Callable[[str, int], None] = _uncounted,
    keyed: Collection[str] = (),
    foreign: Collection[str] = (),
) -> Brain:
    """Build an empty brain.

    Args:
        capacities: slots by tier, "host" first, then the stores from near to far.
        policy_of: tier -> name of its eviction policy, an installed plug-in.
        settings: what every policy is opened with.
        tokens_per_block: told to policies that weigh a block by its position.
        retain: what hints may take.
        promote: which blocks of a get from a store take host slots on their way.
        count_evicted: told (tier, blocks) whenever something leaves to make room.
        keyed: tiers whose store is addressed by key.
        foreign: tiers that lie on other machines; they have no policy, see flexkv.cluster.

    Raises:
        PluginError: a policy is unknown or broken.
        ConfigError: a policy refuses its settings, or there are too many blocks or tiers.
    """
    assert next(iter(capacities)) == HOST, "tier 0 is the host"
    # a put enters its blocks before those that make room for them leave: the host's share twice
    max_blocks = sum(capacities.values()) + capacities[HOST] + _SPARE_ENTRIES
    index = PrefixIndex(max_blocks, list(capacities), find_any=bool(foreign))
    tiers = []
    for number, (name, slots) in enumerate(capacities.items()):
        if name not in foreign:
            policy = plugins.load(plugins.POLICIES, policy_of(name))()
            index.set_policy(
                number, policy, settings, capacity_blocks=slots, tokens_per_block=tokens_per_block
            )
        counted = partial(count_evicted, name)
        thresholds = (evict_ratio, evict_start_threshold)
        tiers.append(Tier(name, number, index, SlotPool(slots), *thresholds, counted))
    ledger = Ledger(
        index,
        tiers,
        max_blocks=max_blocks,
        spill=spill,
        max_read_failures=max_read_failures,
        retain=retain,
        keyed=keyed,
        foreign=foreign,
    )
    planner = Planner(ledger, chunk_blocks=chunk_blocks, chunks_in_flight=chunks_in_flight)
    planner.promote = promote
    return Brain(index, ledger, planner)


def brain_for(
    config: FlexKVConfig,
    spec: KVSpec,
    count_evicted: Callable[[str, int], None] = _uncounted,
    keyed: Collection[str] = (),
) -> Brain:
    """Build the brain that a manager with this configuration has; raises as `build_brain`."""
    chunk_blocks = config.chunk_blocks(spec)
    stores = store_slots(config, spec)
    far = stores.pop(REMOTE, 0)
    capacities = {HOST: config.host_slots(spec)} | stores
    if config.cluster_redis_url:
        capacities[PEER] = config.peer_blocks
    brain = build_brain(
        capacities | ({REMOTE: far} if far else {}),
        config.policy_of,
        config.policy_settings(),
        tokens_per_block=spec.tokens_per_block,
        evict_ratio=config.evict_ratio,
        evict_start_threshold=config.evict_start_threshold,
        spill=config.spill,
        max_read_failures=config.max_read_failures,
        retain=RetainLimits(
            config.retain_share, config.retain_blocks, config.retain_ttl_s, config.retain_max_ttl_s
        ),
        promote=config.promote,
        chunk_blocks=chunk_blocks,
        # what keeps the disk busy, and a chunk whose checksums are being verified
        chunks_in_flight=-(-config.disk_bytes_in_flight // config.chunk_bytes) + 1,
        count_evicted=count_evicted,
        keyed=keyed,
        foreign=(PEER,) if config.cluster_redis_url else (),
    )
    if not config.fetch_or_recompute and not config.cluster_redis_url:
        return brain
    worth = Worth(
        list(brain.ledger.tiers),
        tokens_per_block=spec.tokens_per_block,
        block_bytes=spec.block_bytes,
        chunk_blocks=chunk_blocks,
        limits=WorthLimits(
            config.prefill_tokens_per_s,
            config.prefill_crossover_tokens,
            config.recompute_weight,
            config.fetch_margin,
            config.fetch_probe_s,
            declines=config.fetch_or_recompute,
        ),
    )
    if config.cluster_redis_url:  # what others hold may be nearer than the disk
        brain.planner.routes.costs = worth
    return replace(brain, worth=worth)
