"""The DMA scheduler: read, move, write, over the tiers and codecs of one machine; its books.

One at a time, everything queues for a single engine in order of arrival. Otherwise a transfer goes
to the servers on its way at once, and demand overtakes prefetch and migration at chunk borders.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flexkv.sim.clock import VirtualClock
from flexkv.sim.decode.settings import TIERS, Codec, Settings
from flexkv.sim.profiles import TierProfile
from flexkv.sim.servers import Activity, Job, Priority, Server, coalesce, raise_priority, submit

SRAM = "sram"
CAUSES = ("demand", "prefetch", "migration", "weights", "write")


class Transfer:
    """Bytes on their way, perhaps still waiting for the single engine."""

    __slots__ = ("done_s", "job", "on_done", "priority", "start", "wanted_s")

    def __init__(self, priority: Priority, on_done: Callable[[], None]) -> None:
        self.priority, self.on_done = priority, on_done
        self.start: Callable[[Priority], Job] | None = None
        self.job: Job | None = None
        self.done_s: float | None = None
        self.wanted_s: float | None = None  # when somebody came for a prefetch that was not there


class Dma:
    """All servers of a run, and who has moved what: `read_bytes[cause][tier]`, `written_bytes`."""

    def __init__(self, clock: VirtualClock, settings: Settings) -> None:
        self.clock, self.settings = clock, settings
        self.activity = Activity()
        self.one_at_a_time = settings.pipeline.one_at_a_time
        hardware = settings.hardware
        self.tiers = {name: self._server(hardware.tiers[name]) for name in (SRAM, *TIERS)}
        self.links = {name: self._server(link) for name, link in hardware.links.items()}
        self.codecs = settings.codecs
        self._decoders = {
            c.name: self._codec(c, c.decode_bytes_per_s) for c in self.codecs.values()
        }
        self._encoders = {
            c.name: self._codec(c, c.encode_bytes_per_s) for c in self.codecs.values()
        }
        self._waiting: deque[Transfer] = deque()
        self._engine_busy = False
        self.in_flight = 0
        self.read_bytes: dict[str, dict[str, float]] = {c: defaultdict(float) for c in CAUSES}
        self.written_bytes: dict[str, dict[str, float]] = {c: defaultdict(float) for c in CAUSES}

    def _server(self, profile: TierProfile) -> Server:
        if self.one_at_a_time:
            profile = replace(profile, queue_depth=1, channels=1)
        return Server(self.clock, profile, self.activity)

    def _codec(self, codec: Codec, raw_bytes_per_s: float) -> Server:
        """Return a server that takes encoded bytes and is as fast as the codec is in raw ones."""
        rate = raw_bytes_per_s * codec.ratio
        depth = 1 if self.one_at_a_time else 64
        profile = TierProfile(f"codec-{codec.name}", 1.0, 0.0, rate, rate, queue_depth=depth)
        return Server(self.clock, profile, self.activity)

    def path(self, tier: str) -> list[Server]:
        """Return the servers between a tier's bytes and the accelerator."""
        link = self.settings.hardware.tiers[tier].behind
        return [self.tiers[tier], *([self.links[link]] if link else [])]

    def requests(self, tier: str, blocks: NDArray[np.int64], block_bytes: float, parts: int) -> int:
        """Return how many requests fetch these blocks: neighbours merge where the tier lets them.

        Neighbours in the block table are taken for neighbours in the tier.
        """
        limit = self.settings.hardware.tiers[tier].coalesce_bytes
        if limit < 2 * block_bytes:
            return len(blocks) * parts
        return len(coalesce(np.sort(blocks), int(block_bytes), limit))

    def read(
        self, tier: str, codec: str, requests: int, raw_bytes: float,
        cause: str, priority: Priority, on_done: Callable[[], None],
    ) -> Transfer:  # fmt: skip
        """Bring blocks of one tier and codec onto the chip, decoded: the larger they are encoded,
        the longer it takes.
        """
        size_bytes = raw_bytes * self.codecs[codec].ratio
        self.read_bytes[cause][tier] += size_bytes
        path = self.path(tier) if tier != SRAM else [self.tiers[SRAM]]
        if codec != "none":
            path = [*path, self._decoders[codec]]
        return self._go(path, size_bytes, requests, priority, False, on_done)

    def write(
        self, tier: str, codec: str, requests: int, raw_bytes: float,
        cause: str, on_done: Callable[[], None], *, encode: bool = False,
    ) -> Transfer:  # fmt: skip
        """Write blocks that lie on the chip into a tier, encoded on the way if asked."""
        size_bytes = raw_bytes * self.codecs[codec].ratio
        self.written_bytes[cause][tier] += size_bytes
        path = list(reversed(self.path(tier)))
        if encode and codec != "none":
            path = [self._encoders[codec], *path]
        priority = Priority.DEMAND_WRITE if cause == "write" else Priority.WRITE_BACK
        return self._go(path, size_bytes, requests, priority, True, on_done)

    def move(
        self, source: str, held_as: str, target: str, codec: str, requests: int, raw_bytes: float,
        on_done: Callable[[], None],
    ) -> None:  # fmt: skip
        """Read blocks from one tier, encode them if they are not, and write them to another."""

        def there() -> None:
            encode = held_as != codec
            self.write(target, codec, requests, raw_bytes, "migration", on_done, encode=encode)

        self.read(source, held_as, requests, raw_bytes, "migration", Priority.WRITE_BACK, there)

    def want(self, transfer: Transfer) -> None:
        """Somebody waits for a prefetch that is on its way: let it overtake the others."""
        if transfer.wanted_s is None:
            transfer.wanted_s = self.clock.now_s
            transfer.priority = Priority.DEMAND_READ
            if transfer.job is not None and not self.one_at_a_time:
                raise_priority(transfer.job, Priority.DEMAND_READ)

    def _go(
        self, path: list[Server], size_bytes: float, requests: int, priority: Priority,
        write: bool, on_done: Callable[[], None],
    ) -> Transfer:  # fmt: skip
        transfer = Transfer(priority, on_done)

        def start(urgency: Priority) -> Job:
            return submit(
                path, size_bytes, fragments=requests, priority=urgency, write=write,
                on_done=lambda _: self._arrived(transfer),
            )  # fmt: skip

        self.in_flight += 1
        if not self.one_at_a_time or path[0] is self.tiers[SRAM]:
            transfer.job = start(priority)
            return transfer
        transfer.start = start
        self._waiting.append(transfer)
        self._next()
        return transfer

    def _next(self) -> None:
        if self._engine_busy or not self._waiting:
            return
        transfer = self._waiting.popleft()
        assert transfer.start is not None
        self._engine_busy = True
        transfer.job = transfer.start(transfer.priority)

    def _arrived(self, transfer: Transfer) -> None:
        transfer.done_s = self.clock.now_s
        self.in_flight -= 1
        if transfer.start is not None:
            self._engine_busy = False
        transfer.on_done()
        if transfer.start is not None:
            self._next()

    def served_bytes(self) -> dict[str, float]:
        """Return what the tiers' servers have moved, in both directions, by their own count."""
        return {name: sum(server.served_bytes) for name, server in self.tiers.items()}

    def booked_bytes(self) -> dict[str, float]:
        """Return what was asked of each tier, by cause and direction summed."""
        total: dict[str, float] = dict.fromkeys((SRAM, *TIERS), 0.0)
        for books in (self.read_bytes, self.written_bytes):
            for by_tier in books.values():
                for tier, size_bytes in by_tier.items():
                    total[tier] += size_bytes
        return total
