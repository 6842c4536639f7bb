"""The demo, seen from the parent: start the engine, listen, kill it, start it again, judge.

`run_demo` (options -> report) - `Options` - `DemoError` (the engine died or hung). The engine is
`flexkv.integration.transformers.demo_worker`, a process of its own, because it is killed with
SIGKILL.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from flexkv.errors import FlexKVError
from flexkv.integration.transformers.demo_report import build_report
from flexkv.integration.transformers.demo_text import Settings

Event = dict[str, Any]
WORKER = "flexkv.integration.transformers.demo_worker"
_LONGEST_LINE_BYTES = 1 << 20


class DemoError(FlexKVError):
    """The demo's engine died before its time, or said nothing for too long."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to run and where.

    `model` is a directory (None: SmolLM2-135M-Instruct), `out_dir` takes the log, the report, the
    chart and, while the demo runs, the disk tier; `silence_s` is how long the engine may say
    nothing. Lengths are in tokens.
    """

    out_dir: Path
    model: Path | None = None
    cache_dir: Path | None = None
    document_tokens: int = 7168
    chat_tokens: int = 1024
    answer_tokens: int = 16
    silence_s: float = 180.0

    def settings(self, disk_dir: Path) -> Settings:
        """What the engine is told."""
        return Settings(
            disk_dir=str(disk_dir.resolve()),
            model=str(self.model.resolve()) if self.model else None,
            cache_dir=str(self.cache_dir.resolve()) if self.cache_dir else None,
            document_tokens=self.document_tokens,
            chat_tokens=self.chat_tokens,
            answer_tokens=self.answer_tokens,
        )


async def run_demo(options: Options, listen: Callable[[Event], None]) -> dict[str, Any]:
    """Run all three ways and return the report; `listen` hears every event of the engine.

    Raises:
        DemoError: the engine died or hung; the message ends with the last line of its log.
    """
    options.out_dir.mkdir(parents=True, exist_ok=True)
    disk_dir = options.out_dir / "ssd"
    shutil.rmtree(disk_dir, ignore_errors=True)
    disk_dir.mkdir()
    settings = options.settings(disk_dir)
    events: list[Event] = []

    def hear(event: Event) -> None:
        events.append(event)
        listen(event)

    try:
        await _live(options, settings, "first", "writing", hear)
        await _live(options, settings, "second", "done", hear)
    finally:
        shutil.rmtree(disk_dir, ignore_errors=True)
    return build_report(events)


async def _live(
    options: Options, settings: Settings, life: str, last: str, hear: Callable[[Event], None]
) -> None:
    """Start the engine, hear it until it says `last`, and end it with SIGKILL, whatever it is
    doing.
    """
    command = [sys.executable, "-m", WORKER, life, json.dumps(asdict(settings))]
    log = options.out_dir / f"demo-engine-{life}.log"
    with log.open("wb") as stderr:
        process = await anyio.open_process(command, stderr=stderr)
        try:
            async for event in _events(process, options.silence_s):
                hear(event)
                if event["event"] == last:
                    process.kill()
                    await process.wait()
                    hear({"event": "killed", "life": life, "signal": -(process.returncode or 0)})
                    return
            raise DemoError(
                f"the engine's {life} life ended before it was killed: {_last_line(log)}"
            )
        except TimeoutError as error:
            raise DemoError(
                f"the engine's {life} life said nothing for {options.silence_s} s: "
                f"{_last_line(log)}"
            ) from error
        finally:
            if process.returncode is None:
                process.kill()
            with anyio.CancelScope(shield=True):
                await process.aclose()


async def _events(process: Process, silence_s: float) -> AsyncIterator[Event]:
    assert process.stdout is not None
    lines = BufferedByteReceiveStream(process.stdout)
    while True:
        try:
            with anyio.fail_after(silence_s):
                line = await lines.receive_until(b"\n", _LONGEST_LINE_BYTES)
        except (anyio.IncompleteRead, anyio.EndOfStream):
            return
        yield json.loads(line)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"its log, {log}, is empty"
