"""From a story that fails to a short one that fails the same way.

`shrink` (drop steps, then make the rest simpler, while the same kind of violation comes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from flexkv.testing.worlds.story import Step, Story

Fails = Callable[[Story], bool]

_CALM = {
    "policy": "lru",
    "evict_ratio": 0.0,
    "tickets": 64,
    "queue": 64,
    "in_flight": 16,
    "staging": 4,
}


def shrink(story: Story, fails: Fails, *, tries: int = 2000) -> Story:
    """Return a shorter story for which `fails` is true, as it is for `story`.

    Args:
        fails: tells a story and says whether it still goes wrong the same way.
        tries: stories to tell at most.
    """
    left = tries

    def still_fails(candidate: Story) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and fails(candidate)

    while True:
        before = story
        story = _drop_steps(story, still_fails)
        story = _take_first(story, still_fails, _simpler)
        if story == before or left <= 0:
            return story


def _drop_steps(story: Story, fails: Fails) -> Story:
    """Drop runs of steps, long ones first."""
    size = max(1, len(story.steps) // 2)
    while size:
        start = 0
        while start < len(story.steps):
            shorter = replace(story, steps=story.steps[:start] + story.steps[start + size :])
            if fails(shorter):
                story = shorter
            else:
                start += size
        size //= 2
    return story


def _take_first(
    story: Story, fails: Fails, variants: Callable[[Story], Iterator[Story]]
) -> Story:
    """Go on to the first variant that fails, until none does."""
    while True:
        for variant in variants(story):
            if fails(variant):
                story = variant
                break
        else:
            return story


def _simpler(story: Story) -> Iterator[Story]:
    """Stories with one thing simpler."""
    for place, (name, value) in enumerate(story.settings):
        calm = _CALM.get(name, value)
        if value != calm:
            settings = (*story.settings[:place], (name, calm), *story.settings[place + 1 :])
            yield replace(story, settings=settings)
    for place, step in enumerate(story.steps):
        for simple in _simpler_step(step):
            steps = (*story.steps[:place], simple, *story.steps[place + 1 :])
            yield replace(story, steps=steps)


def _simpler_step(step: Step) -> Iterator[Step]:
    arguments: dict[str, Any] = step.arguments
    if step.pause_ms:
        yield replace(step, pause_ms=0.0)
    path = arguments.get("path", ())
    if len(path) > 1:
        yield replace(step, arguments={**arguments, "path": path[:-1]})
    if any(path):
        yield replace(step, arguments={**arguments, "path": (0,) * len(path)})
    for name, plain in (("namespace", ()), ("durable", False), ("skip", 0), ("times", 1)):
        if arguments.get(name, plain) != plain:
            yield replace(step, arguments={**arguments, name: plain})
