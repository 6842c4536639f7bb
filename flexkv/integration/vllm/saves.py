"""Saves of requests that still run, and whose blocks still wait for a save.

`Saves.admitted` (a request gets its blocks), `scheduled` (with every step), `computed` (a step's
outcome is known) - `finished` (a request ends) - `over` (a save has ended). All of it runs in
vLLM's thread.

A block is saved when the outcome of the step that filled it is known: until then vLLM may take back
what was computed from a load that failed. A preempted request loses its blocks at once; those of
them that a save still reads are withdrawn from it, see `flexkv.ranks.gates`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from flexkv.integration.vllm.requests import State, Work


@dataclass(eq=False, slots=True)
class _Running:
    """A request that has blocks: `saves` are under way, `asked_tokens` is how far they reach."""

    request: Any
    state: State
    blocks: list[int] = field(default_factory=list)
    saves: list[Work] = field(default_factory=list)
    asked_tokens: int = 0


class Saves:
    """Puts the finished blocks of running requests every so many tokens (0: never), of models with
    one group.

    Args:
        size: tokens per block.
        start: begins the save of a request's first blocks.
        prompt_only: leave out what is generated.
    """

    def __init__(
        self,
        every_tokens: int,
        size: int,
        start: Callable[[Any, State, Sequence[list[int]], int], Work],
        *,
        prompt_only: bool,
    ) -> None:
        self._every, self._size, self._start = every_tokens, size, start
        self._prompt_only = prompt_only
        self._running: dict[str, _Running] = {}
        self._steps: deque[dict[str, int]] = deque()  # under way: tokens computed after them
        self._leaving: dict[str, int] = {}  # finished requests: saves that their blocks wait for

    def admitted(self, request: Any, state: State) -> None:
        """A request is about to get blocks, for the first time or after a preemption."""
        if self._every and request.request_id not in self._running:
            self._running[request.request_id] = _Running(request, state)

    def scheduled(self, output: Any) -> list[int]:
        """Take note of a step; return the blocks that saves lose to others in it."""
        if not self._every:
            return []
        withdrawn: list[int] = []
        for name in output.preempted_req_ids or ():
            running = self._running.get(name)
            if running is not None:
                withdrawn += (block for save in running.saves for block in save.blocks)
                running.blocks = []
                self._forget_steps(name)
        for new in output.scheduled_new_reqs:
            if new.req_id in self._running:
                self._running[new.req_id].blocks = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            running = self._running.get(name)
            if running is not None:
                kept = [] if name in cached.resumed_req_ids else running.blocks
                running.blocks = kept + list(blocks[0] if blocks else ())
        computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        counts = output.num_scheduled_tokens
        self._steps.append(
            {name: computed[name] + counts[name] for name in counts if name in self._running}
        )
        return withdrawn

    def computed(self) -> None:
        """The outcome of the oldest step is known: save what is worth it."""
        for name, tokens in (self._steps.popleft() if self._steps else {}).items():
            running = self._running.get(name)
            if running is None:
                continue
            request, state = running.request, running.state
            if request.num_computed_tokens < tokens:  # taken back, and with it what came after
                self._forget_steps(name)
                continue
            if state.load is not None and not state.load.reported:
                continue
            limit = request.num_prompt_tokens if self._prompt_only else request.num_tokens - 1
            whole = min(tokens, limit) // self._size
            if whole * self._size >= max(running.asked_tokens, state.known_tokens) + self._every:
                running.asked_tokens = whole * self._size
                save = self._start(request, state, [running.blocks], whole)
                save.silent = True
                running.saves.append(save)

    def finished(self, name: str) -> Collection[Work]:
        """Forget a request; return its saves under way, for `wait_for`."""
        running = self._running.pop(name, None)
        return [] if running is None else running.saves

    def wait_for(self, name: str, saves: Collection[Work]) -> bool:
        """Have a finished request's blocks stay in use until these saves have ended, if any."""
        for save in saves:
            save.silent = False
        if saves:
            self._leaving[name] = len(saves)
        return bool(saves)

    def over(self, save: Work) -> bool:
        """A save has ended; whether vLLM is to be told that its request's blocks are free."""
        running = self._running.get(save.request)
        if save.silent:
            if running is not None and save in running.saves:
                running.saves.remove(save)
                running.state.known_tokens = max(running.state.known_tokens, save.moved_tokens)
                if save.moved_tokens < save.tokens:  # try again some time
                    running.asked_tokens = running.state.known_tokens
            return False
        left = self._leaving.pop(save.request, 1) - 1
        if left:
            self._leaving[save.request] = left
        return not left

    def _forget_steps(self, name: str) -> None:
        for step in self._steps:
            step.pop(name, None)
