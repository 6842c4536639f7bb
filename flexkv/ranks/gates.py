"""Whose turn it is at a worker's device blocks: `Gate`.

`begin`, `wait` (the engine's thread) - `enter`, `leave`, `reopen` (the thread that copies). The
engine gives blocks to requests step by step, and each copy comes with the step from which on its
request had them. It is held back until the engine has begun that step - what it reads was written
by steps before, what it writes is not in use by them any more - and is refused when its blocks have
been taken away since.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

import anyio
import numpy as np
from numpy.typing import NDArray

from flexkv.model import SlotIds


class Gate:
    """Lets copies pass in time. `wake` is called when the thread that copies has to look again."""

    def __init__(self, blocks: int, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._step = 0
        self._held = 0  # copies that wait for their step
        self._since: NDArray[np.int64] = np.zeros(blocks, np.int64)  # earlier stamps are refused
        self._running: dict[int, tuple[SlotIds, bool]] = {}
        self._left = threading.Condition()
        self._opened = anyio.Event()

    # --- the engine's thread

    def begin(self, step: int, withdrawn: Collection[int] = ()) -> None:
        """The engine begins `step`; `withdrawn` blocks have changed hands.

        Returns when no copy with an older stamp touches those any more. The copies are of this
        process, so that this does not take long, whatever becomes of the manager.
        """
        if withdrawn:
            blocks = np.fromiter(withdrawn, np.int64, len(withdrawn))
            with self._left:
                self._since[blocks] = step
                self._left.wait_for(
                    lambda: not any(np.isin(ids, blocks).any() for ids, _ in self._running.values())
                )
        self._step = max(self._step, step)
        if self._held:
            self._wake()

    @property
    def landing(self) -> bool:
        """Whether a copy into our memory runs."""
        return any(to_device for _, to_device in list(self._running.values()))

    def wait(self) -> None:
        """Wait until no copy into our memory runs."""
        with self._left:
            self._left.wait_for(lambda: not self.landing)

    # --- the thread that copies

    async def enter(self, number: int, step: int, blocks: SlotIds, *, to_device: bool) -> bool:
        """Wait for `step`; False: the blocks were withdrawn, the copy must not run."""
        self._held += 1  # before the look: `begin` looks the other way round
        try:
            while self._step < step:
                await self._opened.wait()
        finally:
            self._held -= 1
        with self._left:
            if int(self._since[blocks].max()) > step:
                return False
            self._running[number] = blocks, to_device
        return True

    def leave(self, number: int) -> None:
        """Copy `number` is over."""
        with self._left:
            self._running.pop(number, None)
            self._left.notify_all()

    def leave_all(self) -> None:
        """No copy runs any more."""
        with self._left:
            self._running.clear()
            self._left.notify_all()

    def reopen(self) -> None:
        """Have those who wait for a step look again."""
        opened, self._opened = self._opened, anyio.Event()
        opened.set()
