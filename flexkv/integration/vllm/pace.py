"""How long vLLM's steps take, for whoever weighs fetching against computing.

`Pace.scheduled` (a step goes off) - `Pace.over` (its outcome is there). Steps that are scheduled
ahead wait for those before them: a step takes from its start, or the end of the one before, to its
own end. Both calls are vLLM's thread's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

Tell = Callable[[int, float, int], object]  # tokens, elapsed_ms, past_tokens


class Pace:
    """Times steps.

    Args:
        tell: called once for each step that computed something, see KVManager.computed.
        steps_ahead: how many steps are under way at once at most; one without an outcome does not
            put the others out of order.
    """

    def __init__(self, tell: Tell, steps_ahead: int) -> None:
        self._tell = tell
        self._steps: deque[tuple[bool, int, int, float]] = deque(maxlen=max(1, steps_ahead))
        self._ended_s = 0.0

    def scheduled(self, output: Any, now_s: float) -> None:
        """Note a SchedulerOutput."""
        works = output.total_num_scheduled_tokens > 0
        self._steps.append((works, *_as_one_prompt(output), now_s))

    def over(self, now_s: float) -> None:
        """Note the outcome of the oldest step."""
        if not self._steps:
            return
        works, tokens, past_tokens, begun_s = self._steps.popleft()
        begun_s, self._ended_s = max(begun_s, self._ended_s), now_s
        if works:
            self._tell(tokens, (now_s - begun_s) * 1e3, past_tokens)


def _as_one_prompt(output: Any) -> tuple[int, int]:
    """The prompt tokens of a step, and a place in one prompt where they cost the same attention:
    around their mean position. A request with one token is taken to decode.
    """
    counts, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    parts = [(counts[name], start) for name, start in starts.items() if counts.get(name, 0) > 1]
    tokens = sum(count for count, _ in parts)
    if not tokens:
        return 0, 0
    middle = sum(count * (start + count / 2) for count, start in parts) / tokens
    return tokens, max(0, round(middle - tokens / 2))
