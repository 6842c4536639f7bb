"""Mooncake at arm's length: `MooncakeProcess`, a child that is killed when it does not answer.

Mooncake's calls block for as long as a server or a peer stands still. They run in a child, on the
same memory; `call` ends in time, and when it raises, no byte of it can land any more: the child is
gone. The next call starts another one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import msgspec

from flexkv.errors import ConfigError
from flexkv.memory import Arena

PROGRAM = Path(__file__).with_name("mooncake_child.py")
HINT = (
    "pip install 'flexkv[mooncake]' (or Mooncake's wheel for your accelerator), and the system's "
    "libibverbs1, libnuma1 and libcurl4"
)
_CLOSE_S = 5.0


def installed() -> bool:
    """Whether Mooncake's package is there."""
    return find_spec("mooncake") is not None


def require() -> None:
    """Raise ConfigError where Mooncake is not installed."""
    if not installed():
        raise ConfigError(f"Mooncake is not installed; install it with: {HINT}")


class _Child:
    """One process, and our ends of its pipes."""

    def __init__(self, setup: Mapping[str, Any], regions: Sequence[Arena], lanes: int) -> None:
        self.control, control = Pipe()
        pairs = [Pipe() for _ in range(lanes)]
        self.pipes = [ours for ours, _ in pairs]
        self.ready, self.late = [False] * lanes, False
        theirs = [control, *(other for _, other in pairs)]
        numbers = [pipe.fileno() for pipe in theirs]
        files = [arena.fd for arena in regions]
        arguments = [str(numbers[0]), ",".join(map(str, numbers[1:])), ",".join(map(str, files))]
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if setup["verbose"] else subprocess.DEVNULL,
            pass_fds=[*numbers, *files],
            process_group=0,  # what a terminal sends to us is not for it
        )
        for pipe in theirs:
            pipe.close()
        self.control.send_bytes(msgspec.msgpack.encode(setup))

    def end(self) -> None:
        """Kill it, and return when it is gone. Pipes close when nobody uses the object any more."""
        self.process.kill()
        self.process.wait()

    def last_words(self) -> str:
        """What it said before it ended, the first time that somebody asks."""
        with contextlib.suppress(OSError, EOFError):
            if self.control.poll(0):
                return self.control.recv_bytes().decode(errors="replace")
        return f"the process of Mooncake ended with {self.process.wait()}"


class MooncakeProcess:
    """A child with `lanes` pipes, each for one thread at a time, on `regions` of memory.

    `setup` names the `kind` of engine (see `mooncake_child`) and what it is made with; a child is
    told what it says when that starts.
    """

    def __init__(self, setup: Mapping[str, Any], regions: Sequence[Arena], lanes: int) -> None:
        self.setup, self._regions, self._lanes = dict(setup), list(regions), lanes
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._closed = self._cut = False

    def start(self) -> None:
        """Start the child where there is none; does not wait for it."""
        self._alive()

    def call(self, lane: int, timeout_s: float, verb: str, *words: Any) -> Any:
        """Have the child do `verb` and return its answer.

        Raises:
            OSError: no answer in time, or none at all. Nothing of the call goes on.
        """
        child = self._alive()
        if self._cut:  # looked at after the child was there, as `cut` does it the other way round
            raise ConnectionError("given up")
        pipe = child.pipes[lane]
        try:
            if not child.ready[lane]:  # the server may be away: starting is not given up
                if not pipe.poll(0 if child.late else timeout_s):
                    child.late = True  # whoever comes next need not wait again
                    raise TimeoutError(f"Mooncake is not ready after {timeout_s} s")
                pipe.recv_bytes()
                child.ready[lane] = True
            pipe.send_bytes(msgspec.msgpack.encode((verb, *words)))
            if not pipe.poll(timeout_s):
                self._drop(child)
                raise TimeoutError(f"no answer within {timeout_s} s")
            answer = msgspec.msgpack.decode(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            raise ConnectionError(self._drop(child)) from None
        if isinstance(answer, dict) and "error" in answer:
            raise OSError(answer["error"])
        return answer

    def cut(self) -> None:
        """Have the call of another thread end now, and further ones at once, until `mend`."""
        self._cut = True
        if child := self._child:
            child.process.kill()

    def mend(self) -> None:
        """Allow calls again."""
        self._cut = False

    def watched(self) -> int | None:
        """Return a descriptor that is readable once the child has ended, the caller's to close;
        None where there is no child.

        Raises:
            OSError: processes cannot be watched here.
        """
        child = self._child
        return os.pidfd_open(child.process.pid) if child else None

    def forget(self) -> str:
        """Let a child go that has ended, so that the next call starts another; says why it did."""
        child = self._child
        return self._drop(child) if child else "there is none"

    def close(self) -> None:
        """End the child: it may say goodbye, for a while. Blocks; twice is fine."""
        with self._lock:
            self._closed = True
            child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if any(child.ready):  # else there is nothing to say goodbye to
                child.control.send_bytes(b"close")
                child.process.wait(_CLOSE_S)
        child.end()

    @property
    def pid(self) -> int | None:
        """Of the child, where there is one."""
        child = self._child
        return child.process.pid if child else None

    def _alive(self) -> _Child:
        with self._lock:
            if self._closed:
                raise ConnectionError("closed")
            if self._child is None:
                self._child = _Child(self.setup, self._regions, self._lanes)
            return self._child

    def _drop(self, child: _Child) -> str:
        """Kill `child` and say why it ended; whoever asks, it is gone on return."""
        child.end()
        with self._lock:
            if self._child is child:
                self._child = None
            return child.last_words()
