"""What a codec changes about the disk tier: how large its slots are, and what its bytes are called.

`disk_codec` (the one a configuration names, None for none) - `TierCodec.stored_bytes`,
`TierCodec.tag` - `store_slots` - `identities` (of the keys, and of what stores hold). A lossy codec
is part of the identity of the *keys*: a block that came back from the disk is in the host as the
codec left it, so all blocks of such a cache, in every tier, are blocks of that codec. A lossless
one changes the identity of what is on disk alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from flexkv import plugins
from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError
from flexkv.model import DISK, PAGE_BYTES, Identity, KVSpec
from flexkv.protocols import Codec


class Identities(NamedTuple):
    """Whose blocks the keys name, and whose bytes the stores hold."""

    keys: Identity
    disk: Identity
    remote: Identity


@dataclass(frozen=True, slots=True)
class TierCodec:
    """A codec under its name, as it is used by one tier."""

    name: str
    codec: Codec

    @property
    def tag(self) -> str:
        """What identities say: another name or another `revision` of a codec is another codec."""
        return f"{self.name}/{getattr(self.codec, 'revision', 1)}"

    def stored_bytes(self, spec: KVSpec) -> int:
        """Bytes of one encoded block.

        Raises:
            ConfigError: the codec cannot encode such blocks, or its slots are no smaller.
        """
        size = self.codec.encoded_bytes(spec)
        if -(-size // PAGE_BYTES) * PAGE_BYTES >= spec.stride_bytes:
            raise ConfigError(
                f"disk_codec={self.name!r} needs slots for {size} bytes where a block has "
                f"{spec.block_bytes}: slots of one size gain nothing; use larger blocks or no codec"
            )
        return size


def disk_codec(config: FlexKVConfig) -> TierCodec | None:
    """Load the codec of the disk tier.

    Raises:
        PluginError: there is no such codec.
    """
    if config.disk_codec is None or not config.disk_cache_bytes:
        return None
    return TierCodec(config.disk_codec, plugins.load(plugins.CODECS, config.disk_codec)())


def store_slots(config: FlexKVConfig, spec: KVSpec) -> dict[str, int]:
    """Return how many blocks fit into each tier below the host, from near to far, encoded where
    there is a codec; raises as `TierCodec` and config.
    """
    chosen = disk_codec(config)
    return config.store_slots(spec, {} if chosen is None else {DISK: chosen.stored_bytes(spec)})


def identities(config: FlexKVConfig, spec: KVSpec) -> Identities:
    """Return the identities of keys and of the disk; raises as `disk_codec` and config."""
    plain, chosen = config.identity(spec), disk_codec(config)
    if chosen is None:
        return Identities(plain, plain, plain)
    coded = replace(plain, codec=chosen.tag)
    keys = coded if chosen.codec.lossy else plain
    return Identities(keys, coded, keys)
