"""When a codec pays: `Coding` (its figures on a tier) - `Coding.payoff` (a batch with and without
it) - `Coding.break_even_bytes_per_s` (up to which link it pays); `SHARE_BYTES`, `MOST_CORES` (how a
tier with a codec works).

A tier moves a batch in n equal shares through two stages, the link and the codec, and while one
share is decoded the next is read. With a share's r = encoded bytes / link and d = decoded bytes /
codec, the batch takes r + d + (n - 1) * max(r, d); without a codec n * decoded bytes / link.
Writing is the same with the stages the other way round. With b and e the bytes of a block, decoded
and encoded, and D the codec's decoded bytes per second, setting both equal and solving for the link
gives D * (1 - e / (n * b)) where the codec is then the slower stage, else n * D * (1 - e / b): the
codec pays on every slower link. One share (no overlap): D * (1 - e / b). A long stream: D, whatever
the ratio, since then all of the decoding but one share's hides behind the link.

Not in the rule: that more blocks fit (`flexkv sim` counts the hits), and what else the cores do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from flexkv.errors import ConfigError

SHARE_BYTES = 4 << 20  # of decoded blocks that are moved, and coded by one thread, at a time
MOST_CORES = 4  # that code at once


class Payoff(NamedTuple):
    """Seconds of a batch without and with the codec."""

    plain_s: float
    coded_s: float

    @property
    def pays(self) -> bool:
        """Whether the codec saves time."""
        return self.coded_s < self.plain_s

    @property
    def speedup(self) -> float:
        """How many times as fast the batch is with the codec."""
        return self.plain_s / self.coded_s


@dataclass(frozen=True, slots=True)
class Coding:
    """A codec on a tier. Rates are of decoded bytes on one core; `share_bytes` of decoded blocks
    are moved and coded at a time, by up to `cores` threads.

    Raises:
        ConfigError: a number is not above 0.
    """

    block_bytes: int
    stored_bytes: int
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    cores: int = 1
    share_bytes: int = SHARE_BYTES

    def __post_init__(self) -> None:
        numbers = (self.block_bytes, self.stored_bytes, self.cores, self.share_bytes)
        if min(*numbers, self.encode_bytes_per_s, self.decode_bytes_per_s) <= 0:
            raise ConfigError(f"sizes, rates and cores of a codec are above 0, got {self}")

    @property
    def share_blocks(self) -> int:
        """Blocks of a share."""
        return max(1, self.share_bytes // self.block_bytes)

    def shares(self, blocks: int) -> int:
        """Shares of a batch."""
        return -(-blocks // self.share_blocks)

    def bytes_per_s(self, shares: int, *, writing: bool = False) -> float:
        """Decoded bytes per second of the codec, by as many cores as there are shares for."""
        one = self.encode_bytes_per_s if writing else self.decode_bytes_per_s
        return one * max(1, min(self.cores, shares))

    def payoff(self, blocks: int, link_bytes_per_s: float, *, writing: bool = False) -> Payoff:
        """Return what a batch of blocks takes on a link, without the codec and with it."""
        shares = self.shares(blocks)
        if not shares:
            return Payoff(0.0, 0.0)
        decoded = blocks * self.block_bytes / shares
        link_s = decoded * self.stored_bytes / self.block_bytes / link_bytes_per_s
        codec_s = decoded / self.bytes_per_s(shares, writing=writing)
        coded_s = link_s + codec_s + (shares - 1) * max(link_s, codec_s)
        return Payoff(blocks * self.block_bytes / link_bytes_per_s, coded_s)

    def break_even_bytes_per_s(self, blocks: int, *, writing: bool = False) -> float:
        """Return the link's bytes per second below which the codec saves time on such a batch; 0
        where it never does.
        """
        shares = self.shares(blocks)
        kept = self.stored_bytes / self.block_bytes
        if not shares or kept >= 1:
            return 0.0
        codec = self.bytes_per_s(shares, writing=writing)
        by_codec = codec * (1 - kept / shares)
        return by_codec if by_codec >= codec * kept else shares * codec * (1 - kept)
