"""A world: one story told on a virtual loop, watched at every turn.

`tell` (a story -> Outcome) - `Outcome` (what was wrong, if anything, and the hash of all that
happened).
"""

from __future__ import annotations

import asyncio
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from flexkv.testing.loop import StandstillError, VirtualLoop
from flexkv.testing.worlds.disk import Platter
from flexkv.testing.worlds.hardware import Fault, Journal, Violation
from flexkv.testing.worlds.life import Life
from flexkv.testing.worlds.remote import Server
from flexkv.testing.worlds.story import Step, Story
from flexkv.testing.worlds.watch import Key

_LIMIT_S = 5000.0
_LIMIT_TURNS = 50_000
_REREAD = 6  # prompts that are looked for after the last restart


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a world ended: the violation (None: all was well), the hash of its events, how many they
    were, and their lines if they were asked for.
    """

    violation: Violation | None
    trace: int
    events: int
    turns: int
    lines: tuple[str, ...] = ()


def tell(story: Story, *, keep: bool = False) -> Outcome:
    """Let a story happen. The same story always happens the same way.

    Args:
        keep: keep the lines of what happened.
    """
    journal = Journal(keep=keep)
    world = _World(story, journal)
    loop = VirtualLoop(world.look, limit_s=_LIMIT_S, limit_turns=_LIMIT_TURNS)
    journal.clock = loop.time
    loop.set_exception_handler(world.note_exception)
    try:
        with suppress(Violation):  # it is in the journal
            loop.run(world.run())
    except StandstillError as error:
        journal.accuse("standstill", str(error))
    except Exception as error:
        journal.accuse("crash", "".join(traceback.format_exception(error)))
    return Outcome(
        journal.violation, journal.hash, journal.events, loop.turns, tuple(journal.lines or ())
    )


class _World:
    """The lives of a story, one after the other."""

    def __init__(self, story: Story, journal: Journal) -> None:
        self._story, self._journal = story, journal
        self._lives = 0
        self._server = Server()
        self._life: Life | None = None

    def look(self) -> None:
        """Look at the life that there is; raise the first violation."""
        life = self._life
        if life is not None and life.watch is not None:
            life.watch.look(perfect=life.perfect)
        if self._journal.violation is not None:
            raise self._journal.violation

    def note_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception that nobody took: from a callback, or from a task that was dropped."""
        if loop.is_running():
            error = context.get("exception")
            self._journal.accuse("exception", f"{context.get('message')}: {error!r}")

    async def run(self) -> None:
        """All steps, then an end in order, then a look at what is left."""
        self._life = await self._begin(None)
        for step in self._story.steps:
            await asyncio.sleep(step.pause_ms / 1e3)
            self._journal.write(step.describe())
            await self._do(step)
        await self._life.settle()
        if not self._life.hardware.stuck:
            await self._life.prove_room(len(self._story.steps))
        self._life = await self._reopen(self._life)
        self._life.get_all(len(self._story.steps) + 1, self._prompts())
        await self._life.settle()
        await self._life.close()

    def _prompts(self) -> list[dict[str, Any]]:
        """The prompts of the last puts, each once."""
        puts = [step.arguments for step in self._story.steps if step.verb == "put"]
        once = {(put["path"], put["namespace"]): None for put in puts}
        return [{"path": path, "namespace": namespace} for path, namespace in once][-_REREAD:]

    async def _begin(self, platter: Platter | None, expected: set[Key] | None = None) -> Life:
        """Open the next life on what the last one left; `expected` says what that must be."""
        self._lives += 1
        story, perfect = self._story, self._life is None or self._life.perfect
        life = Life(
            story.seed,
            self._lives,
            story.settings,
            platter,
            self._server,
            self._journal,
            perfect=perfect,
            expected=expected if perfect else None,
        )
        await life.open()
        return life

    async def _reopen(self, life: Life) -> Life:
        """Close in order; what was on disk then must be there again."""
        platter = await life.close()
        return await self._begin(platter, life.on_disk())

    async def _do(self, step: Step) -> None:
        life = self._life
        assert life is not None
        arguments = step.arguments
        match step.verb:
            case "put" | "get" | "prefetch" | "match" | "put_match" | "launch":
                getattr(life, step.verb)(step.number, **arguments)
            case "cancel_plan" | "cancel" | "leave" | "remove" | "retain":
                getattr(life, step.verb)(**arguments)
            case "flush" | "reset":
                await life.whole(step.verb, **arguments)
            case "fault":
                life.arm(Fault(**arguments))
            case "reopen":
                self._life = await self._reopen(life)
            case "crash":
                self._life = await self._begin(await life.crash(arguments["how"]))
            case verb:
                raise ValueError(f"no story has a step {verb!r}")
