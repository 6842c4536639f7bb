"""How many transfers of each kind run and wait.

`Admission.check` (refuse what would wait too long), `spare` (room for work that nobody asked for) -
`enter`, `leave` (a transfer and its end) - `begin`, `end` (take one of the places of those that
run, and leave it).
"""

from __future__ import annotations

from flexkv.config import FlexKVConfig
from flexkv.errors import CapacityError
from flexkv.lanes import Lane


class Admission:
    """Limits per kind: `max_in_flight_*` run, `max_queued_requests` wait; prefetches never wait."""

    def __init__(self, config: FlexKVConfig) -> None:
        self._lanes = {
            "get": Lane("get", config.max_in_flight_gets),
            "put": Lane("put", config.max_in_flight_puts),
            "prefetch": Lane("prefetch", config.max_in_flight_prefetches),
        }
        queued = config.max_queued_requests
        self._limits = {
            kind: lane.limit + (0 if kind == "prefetch" else queued)
            for kind, lane in self._lanes.items()
        }
        self._entered = dict.fromkeys(self._lanes, 0)

    @property
    def kinds(self) -> list[str]:
        """What is counted."""
        return list(self._lanes)

    def entered(self, kind: str) -> int:
        """Transfers of a kind that run or wait."""
        return self._entered[kind]

    def check(self, kind: str) -> None:
        """Refuse one more transfer of a kind when too many are there.

        Raises:
            CapacityError: as many as may run and wait do.
        """
        if self._entered[kind] >= self._limits[kind]:
            running = min(self._entered[kind], self._lanes[kind].limit)
            raise CapacityError(
                f"{running} {kind} transfers are running and {self._entered[kind] - running} wait; "
                f"raise max_in_flight_{'prefetche' if kind == 'prefetch' else kind}s or "
                "max_queued_requests, or ask less often"
            )

    def spare(self, kind: str) -> bool:
        """Whether there is room for work that nobody asked for: nothing waits, and of its kind at
        most half of what may run does.
        """
        waits = any(self._entered[name] > lane.limit for name, lane in self._lanes.items())
        return not waits and 2 * self._entered[kind] < self._lanes[kind].limit

    def enter(self, kind: str) -> None:
        """Count a transfer."""
        self._entered[kind] += 1

    def leave(self, kind: str) -> None:
        """Count it no more."""
        self._entered[kind] -= 1

    async def begin(self, kind: str) -> None:
        """Wait for one of the places of those that run, and take it."""
        await self._lanes[kind].acquire(1)

    def end(self, kind: str) -> None:
        """Leave the place that `begin` took."""
        self._lanes[kind].release(1)
