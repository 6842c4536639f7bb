"""What happens in a world: settings, and steps one after the other. A seed writes a story.

`Step` (a verb, its arguments and the pause before it) - `Story` (settings and steps; `describe` for
people) - `write_story` (the story of a seed). Steps refer to each other by number, so that any of
them may be dropped.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Path = tuple[int, ...]  # a prompt: which branch it takes at each block

PAUSES_MS = (0.0, 0.0, 0.0, 0.1, 0.5, 1.0, 3.0, 10.0, 100.0)
NAMESPACES = ((), ("tenant-7",))
CODECS = ("", "", "world-half", "world-half-lossy")
POLICIES = (
    *("lru", "lru", "hazard", "hazard", "slru", "lfu", "fifo", "steps"),
    *("arc", "s3fifo", "sieve", "gdsf", "mru"),
)
FAULTS = {
    "read": ("EIO", "short", "flip", "flip", "late", "never"),
    "write": ("EIO", "ENOSPC", "short", "lost", "flip", "flip", "late", "never"),
    "record": ("EIO", "torn", "lost", "late", "never"),
    "remote read": ("hangup", "expired", "flip", "flip", "short", "late", "never"),
    "remote write": ("hangup", "full", "lost", "flip", "flip", "late", "never"),
    "remote discard": ("hangup", "late", "never"),
    "gather": ("EIO", "refuse", "late", "never"),
    "scatter": ("EIO", "refuse", "late", "never"),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One step: wait `pause_ms` after the one before, then do `verb`."""

    number: int
    verb: str
    pause_ms: float = 0.0
    arguments: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        """One line for people."""
        told = ", ".join(f"{name}={_tell(value)}" for name, value in self.arguments.items())
        pause = f"{self.pause_ms:g} ms later, " if self.pause_ms else ""
        return f"#{self.number:<3} {pause}{self.verb} {told}".rstrip()


@dataclass(frozen=True, slots=True)
class Story:
    """A world before it happens: the seed of its latencies, its settings and its steps."""

    seed: int
    settings: tuple[tuple[str, Any], ...]
    steps: tuple[Step, ...]

    def describe(self) -> str:
        """The whole story, a step a line."""
        settings = ", ".join(f"{name}={value}" for name, value in self.settings)
        return "\n".join([f"settings: {settings}", *(step.describe() for step in self.steps)])


def _tell(value: Any) -> str:
    if isinstance(value, tuple):
        return "/".join(map(str, value)) or "-"
    return str(value)


def write_story(seed: int) -> Story:
    """The story of a seed: the same one on every machine."""
    return _Author(seed).write()


class _Author:
    """Makes up a story, keeping track of what later steps may refer to."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random(seed)
        self._transfers: list[int] = []
        self._plans: list[int] = []
        self._prompts: list[dict[str, Any]] = []
        self._branches = self._random.choice((1, 2, 3, 3))
        self._host = self._random.choice((2, 3, 4, 4, 6))
        self._disk = self._random.choice((0, 0, 3, 3, 6, 12, 20))
        remotes = (0, 0, 0, 4, 10, 24) if self._disk else (0, 4, 10, 24)
        self._remote = self._random.choice(remotes)
        self._depth = self._host + (self._random.random() < 0.3)

    def write(self) -> Story:
        settings = self._settings()
        faulty = self._random.random() < 0.6
        verbs: list[tuple[Callable[[], tuple[str, dict[str, Any]]], float]] = [
            (self._put, 12),
            (self._get, 12),
            (self._prefetch, 3),
            (self._match, 2),
            (self._put_match, 2),
            (self._launch, 4),
            (self._cancel_plan, 1),
            (self._cancel, 3),
            (self._leave, 2),
            (self._remove, 2),
            (self._retain, 3),
            (lambda: ("flush", self._wait()), 1),
            (lambda: ("reset", self._wait()), 0.5),
            (lambda: ("reopen", {}), 0.5),
            (self._crash, 2 if self._disk else 1),
            (self._fault, 5 if faulty else 0),
        ]
        choices, weights = [verb for verb, _ in verbs], [weight for _, weight in verbs]
        steps = []
        for number in range(self._random.choice((6, 12, 20, 30, 40))):
            self._number = number
            verb, arguments = self._random.choices(choices, weights)[0]()
            pause_ms = self._random.choice(PAUSES_MS)
            steps.append(Step(number, verb, pause_ms, arguments))
        return Story(self._seed, settings, tuple(steps))

    def _settings(self) -> tuple[tuple[str, Any], ...]:
        choose = self._random.choice
        eager = self._random.random() < 0.2
        coding = random.Random(
            f"codec {self._seed}"
        )  # of its own: other settings stay as they were
        return (
            ("host", self._host),
            ("disk", self._disk),
            ("remote", self._remote),
            ("spill", choose(("through", "through", "on_evict", "on_evict", "never"))),
            ("policy", choose(POLICIES)),
            ("retain_share", choose((0.3, 0.5, 1.0))),
            ("chunk", choose((1, 2, 4))),
            ("staging", choose((2, 4))),
            ("in_flight", choose((1, 2, 16))),
            ("tickets", choose((16, 64, 64))),
            ("queue", choose((1, 4, 64))),
            ("close_ms", choose((1000, 20_000))),
            ("evict_ratio", choose((0.25, 0.5)) if eager else 0.0),
            ("codec", coding.choice(CODECS) if self._disk else ""),
            ("encoding", coding.choice((2, 4, 16))),
            ("share", coding.choice((1, 2, 4))),
        )

    def _prompt(self) -> dict[str, Any]:
        """A prompt: mostly one that was put, sometimes some other."""
        if self._prompts and self._random.random() < 0.8:
            return self._random.choice(self._prompts)
        depth = self._random.randint(1, self._depth)
        path = tuple(self._random.randrange(self._branches) for _ in range(depth))
        return {"path": path, "namespace": NAMESPACES[self._random.random() < 0.1]}

    def _put(self) -> tuple[str, dict[str, Any]]:
        self._transfers.append(self._number)
        before, self._prompts = self._prompts, []  # a new one, as a rule
        prompt = self._prompt() if self._random.random() < 0.8 or not before else before[-1]
        self._prompts = [*before, prompt]
        return "put", {**prompt, "durable": self._random.random() < 0.3}

    def _get(self) -> tuple[str, dict[str, Any]]:
        self._transfers.append(self._number)
        return "get", self._prompt()

    def _prefetch(self) -> tuple[str, dict[str, Any]]:
        self._transfers.append(self._number)
        return "prefetch", self._prompt()

    def _match(self) -> tuple[str, dict[str, Any]]:
        self._plans.append(self._number)
        return "match", self._prompt()

    def _put_match(self) -> tuple[str, dict[str, Any]]:
        self._plans.append(self._number)
        return "put_match", self._prompt()

    def _launch(self) -> tuple[str, dict[str, Any]]:
        if not self._plans:
            return self._get()
        self._transfers.append(self._number)
        return "launch", {"plan": self._random.choice(self._plans)}

    def _cancel_plan(self) -> tuple[str, dict[str, Any]]:
        if not self._plans:
            return self._match()
        return "cancel_plan", {"plan": self._random.choice(self._plans)}

    def _wait(self) -> dict[str, Any]:
        return {"wait": self._random.random() < 0.5}

    def _of_transfer(self) -> dict[str, Any]:
        return {"transfer": self._random.choice(self._transfers[-4:])}

    def _cancel(self) -> tuple[str, dict[str, Any]]:
        return ("cancel", self._of_transfer()) if self._transfers else self._put()

    def _leave(self) -> tuple[str, dict[str, Any]]:
        return ("leave", self._of_transfer()) if self._transfers else self._put()

    def _remove(self) -> tuple[str, dict[str, Any]]:
        return "remove", self._prompt()

    def _retain(self) -> tuple[str, dict[str, Any]]:
        hint = {
            "priority": self._random.choice((None, 0, 1, 100)),
            "ttl_s": self._random.choice((None, 0.0, 0.002, 0.05)),
            "steps": self._random.choice((None, 0, 1, 4)),
        }
        return "retain", {**self._prompt(), "hint": hint}

    def _crash(self) -> tuple[str, dict[str, Any]]:
        return "crash", {"how": self._random.choice(("kill", "power"))}

    def _fault(self) -> tuple[str, dict[str, Any]]:
        places = ["gather", "scatter"]
        if self._disk:
            places += ["read", "write", "record"]
        if self._remote:
            places += ["remote read", "remote write", "remote discard"]
        place = self._random.choice(places)
        kind = self._random.choice(FAULTS[place])
        skip, times = self._random.choice((0, 0, 1, 3)), self._random.choice((1, 1, 2, 6))
        return "fault", {"place": place, "kind": kind, "skip": skip, "times": times}
