"""The event loops that everything asynchronous must work on: `LOOPS`, `run_on`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

LOOPS = ["asyncio", "debug", "uvloop"] + (["eager"] if sys.version_info >= (3, 12) else [])


def run_on(loop: str, main: Coroutine[Any, Any, T]) -> T:
    """Run `main` as `asyncio.run` does, on one of `LOOPS`."""
    factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(debug=loop == "debug", loop_factory=factory) as runner:
        if loop == "eager":
            runner.get_loop().set_task_factory(asyncio.eager_task_factory)
        return runner.run(main)
