"""Threads that carry blocks to a remote store and back, each with a connection of its own.

`Client` (what a store's protocol must do, blocking) - `Parcel` (a part of a batch) - `Couriers`
(the threads; a parcel ends by completing a part of its ticket). The loop never waits for a socket,
and bytes go from the socket straight into the arena, with the interpreter's lock let go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal, Protocol

from flexkv._core import lib
from flexkv.backends.remote.heads import Heads
from flexkv.model import FAILED, KeyArray, SlotIds, Statuses
from flexkv.telemetry import log

if TYPE_CHECKING:
    from flexkv._core import CData

Verb = Literal["read", "write", "discard"]


class Client(Protocol):
    """One connection, used by one thread at a time. Every call ends within the client's time-out.

    Each verb fills one IOStatus per block into `statuses`, which come as FAILED. A connection that
    breaks is an OSError: blocks without an answer stay FAILED, the next call connects anew.
    """

    def read(
        self,
        names: Sequence[bytes],
        heads: Sequence[memoryview],
        bodies: Sequence[memoryview],
        statuses: Statuses,
    ) -> None:
        """Fill heads and bodies; MISSING where there is none, DAMAGED where the size is wrong."""
        ...

    def write(
        self,
        names: Sequence[bytes],
        heads: Sequence[memoryview],
        bodies: Sequence[memoryview],
        statuses: Statuses,
    ) -> None: ...

    def discard(self, names: Sequence[bytes], statuses: Statuses) -> None: ...

    def close(self) -> None:
        """Give the connection up. Twice is fine."""
        ...


@dataclass(slots=True)
class Parcel:
    """What one courier carries: blocks in arena `slots`, named `names` in the store."""

    verb: Verb
    names: list[bytes]
    keys: KeyArray
    slots: SlotIds
    heads: Heads
    statuses: Statuses
    address: CData | None  # of the ticket
    error: str = ""

    def __len__(self) -> int:
        return len(self.names)


class Couriers:
    """`count` threads; `work(client, parcel)` does a parcel, and may raise OSError."""

    def __init__(
        self,
        count: int,
        connect: Callable[[], Client],
        work: Callable[[Client, Parcel], None],
        name: str,
    ) -> None:
        self._connect, self._work = connect, work
        self._queue: SimpleQueue[Parcel | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"flexkv-{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return len(self._threads)

    def put(self, parcel: Parcel) -> None:
        """Queue a parcel."""
        self._queue.put(parcel)

    def close(self) -> None:
        """End the threads when the queue is empty. Blocks."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        client = self._connect()
        while (parcel := self._queue.get()) is not None:
            try:
                self._work(client, parcel)
            except OSError as error:  # what had its answer before keeps it
                parcel.error = f"{type(error).__name__}: {error}"
                client.close()
            except Exception as error:  # ours, or of a library: no byte of it is good
                log.error("remote.broken", error=repr(error))
                parcel.error = f"{type(error).__name__}: {error}"
                parcel.statuses[:] = FAILED
                client.close()
            address = parcel.address
            assert address is not None
            del parcel  # what it keeps alive must not wait for the next one
            lib.fx_complete(address)
        client.close()
