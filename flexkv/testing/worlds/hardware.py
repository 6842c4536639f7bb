"""What is in flight below a manager: batches that take their time, fail, or hurt each other.

`Hardware.start` (a batch over some cells, landing later) - `Hardware.arm` (a fault for batches to
come) - `Journal` (what happened, its hash, and the first thing that must not have). A cell is a
slot of the host or of the disk, a record or a device block: nobody may write it while others use
it.
"""

from __future__ import annotations

import errno
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flexkv._core import lib
from flexkv.completion import Ticket
from flexkv.protocols import Services
from flexkv.testing.worlds.chance import Chance

Cell = tuple[str, int]

# seconds; the first ones are the usual ones
LATENCIES_S = (0.0, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 2e-2)
LATE_S = 7.0  # beyond the deadline of a transfer
NEVER_S = 1e6  # beyond the end of the world


class Violation(Exception):
    """Something happened that must never happen. `kind` is one word for what."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text

    def __reduce__(self) -> tuple[type[Violation], tuple[str, str]]:
        return Violation, (self.kind, self.text)  # as it goes from process to process


class Journal:
    """What happens in a world, in order; `keep` remembers the lines, else only their hash."""

    def __init__(self, *, keep: bool) -> None:
        self.lines: list[str] | None = [] if keep else None
        self.hash = 0
        self.events = 0
        self.violation: Violation | None = None
        self.clock: Callable[[], float] = lambda: 0.0

    def write(self, *words: object) -> None:
        """Note that something happened now."""
        line = f"{self.clock() * 1e3:10.3f} ms  {' '.join(map(str, words))}"
        self.hash = zlib.crc32(line.encode(), self.hash)
        self.events += 1
        if self.lines is not None:
            self.lines.append(line)

    def accuse(self, kind: str, text: str) -> None:
        """Note a violation; the first one counts. The world ends at its next turn."""
        if self.violation is None:
            self.violation = Violation(kind, text)
            self.write("VIOLATION", kind, text)


@dataclass(slots=True)
class Fault:
    """Trouble for the next `times` batches at `place`, after `skip` that have none."""

    place: str
    kind: str
    skip: int = 0
    times: int = 1


@dataclass(slots=True, eq=False)
class Batch:
    """One batch in flight: what it reads and writes, and what its landing does."""

    place: str
    reads: Sequence[Cell]
    writes: Sequence[Cell]
    land: Callable[[], None]
    address: Any  # of its ticket, if it has one
    number: int = 0


class Hardware:
    """Everything that moves bytes in one life of a manager."""

    def __init__(self, services: Services, chance: Chance, journal: Journal) -> None:
        self.completions, self.arena, self.journal = services.completions, services.arena, journal
        self.stuck = False  # some batch never lands
        self.faults: list[Fault] = []
        self.in_flight: dict[Batch, None] = {}
        self.moved = 0  # batches begun or landed: something may have changed
        self._chance = chance
        self._numbers = 0
        self._readers: Counter[Cell] = Counter()
        self._writers: Counter[Cell] = Counter()

    def fault(self, place: str) -> str:
        """The trouble that the next batch at `place` is in for, "" if none."""
        for fault in self.faults:
            if fault.place != place:
                continue
            if fault.skip:
                fault.skip -= 1
                continue
            fault.times -= 1
            if fault.times <= 0:
                self.faults.remove(fault)
            return fault.kind
        return ""

    def chance(self, sides: int, purpose: str, which: int = 0) -> int:
        """A number below `sides`."""
        return self._chance.below(sides, purpose, which)

    def start(
        self,
        place: str,
        reads: Iterable[Cell],
        writes: Iterable[Cell],
        land: Callable[[], None],
        *,
        fault: str = "",
    ) -> Ticket:
        """Put a batch in flight; `land` is called when it comes down, then its ticket completes.

        Raises:
            CapacityError: all tickets are out; nothing was started.
        """
        ticket = self.completions.ticket()
        self.fly(place, reads, writes, land, ticket.address, fault=fault)
        return ticket

    def fly(
        self,
        place: str,
        reads: Iterable[Cell],
        writes: Iterable[Cell],
        land: Callable[[], None],
        address: Any = None,
        *,
        fault: str = "",
    ) -> None:
        """Put a batch in flight that completes a part of a ticket that there is, or of none."""
        batch = Batch(place, tuple(reads), tuple(writes), land, address, self._numbers)
        self._numbers += 1
        self.moved += 1
        self._enter(batch)
        cells = batch.writes or batch.reads
        delay_s = self._chance.pick(LATENCIES_S, place, cells[0][1] if cells else 0)
        delay_s = {"late": LATE_S, "never": NEVER_S}.get(fault, delay_s)
        self.stuck |= fault == "never"
        self.journal.write("begin", place, *_names(batch), f"for {delay_s * 1e3:g} ms")
        if delay_s:
            self.completions.call_later(delay_s, self._land, batch)
        else:
            self._land(batch)

    def _land(self, batch: Batch) -> None:
        self.moved += 1
        batch.land()
        self._leave(batch)
        self.journal.write("land", batch.place, *_names(batch))
        if batch.address is not None:
            lib.fx_complete(batch.address)

    def _enter(self, batch: Batch) -> None:
        self.in_flight[batch] = None
        for cell in batch.writes:
            if self._readers[cell] or self._writers[cell]:
                busy = next(
                    other
                    for other in self.in_flight
                    if other is not batch and cell in (*other.reads, *other.writes)
                )
                what = f"{batch.place} writes {_name(cell)} while {busy.place} uses it"
                self.journal.accuse("hazard", what)
        for cell in batch.reads:
            if self._writers[cell]:
                what = f"{batch.place} reads {_name(cell)} while it is being written"
                self.journal.accuse("hazard", what)
        self._readers.update(batch.reads)
        self._writers.update(batch.writes)

    def _leave(self, batch: Batch) -> None:
        del self.in_flight[batch]
        self._readers.subtract(batch.reads)
        self._writers.subtract(batch.writes)

    def written(self, kind: str) -> set[int]:
        """Numbers of the cells of a kind that are being written."""
        return {number for batch in self.in_flight for cell, number in batch.writes if cell == kind}


def _name(cell: Cell) -> str:
    return f"{cell[0]}[{cell[1]}]"


def _names(batch: Batch) -> list[str]:
    parts = [_name(cell) for cell in batch.reads]
    if batch.writes:
        parts += ["->", *(_name(cell) for cell in batch.writes)]
    return parts


IO_ERROR, NO_SPACE = -errno.EIO, -errno.ENOSPC
