"""When to leave a store alone that does not answer: `Breaker`.

A store that is down is not one that lacks a block: what fails while the breaker is open is FAILED,
at once, and the store is asked again later. Synchronous and deterministic: `now` is an argument.
"""

from __future__ import annotations


class Breaker:
    """Opens after `failures` in a row; then lets one attempt through each `retry_s`, which doubles
    up to `longest_s` until one succeeds.
    """

    def __init__(self, failures: int, retry_s: float, longest_s: float = 30.0) -> None:
        self.limit, self.retry_s, self.longest_s = failures, retry_s, max(retry_s, longest_s)
        self.failures = 0
        self._wait_s = retry_s
        self._next = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the store counts as down."""
        return self.failures >= self.limit

    def admits(self, now: float) -> bool:
        """Say whether to try; while open, one attempt for each period."""
        if not self.is_open:
            return True
        if now < self._next:
            return False
        self._next = now + self._wait_s
        return True

    def succeeded(self) -> bool:
        """Note that the store answered; True when it had been down."""
        was_open, self.failures, self._wait_s = self.is_open, 0, self.retry_s
        return was_open

    def failed(self, now: float) -> bool:
        """Note that the store did not answer; True when it counts as down from now on."""
        self.failures += 1
        if self.failures < self.limit:
            return False
        if self.failures > self.limit:
            self._wait_s = min(self._wait_s * 2, self.longest_s)
        self._next = now + self._wait_s
        return self.failures == self.limit
