"""Work in other processes: `in_child` (spawned), `until_killed`, `in_fork`.

Functions given to them are module-level, so that a spawned child finds them by name; what they
return or raise comes back.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

_JOIN_S = 30


class ChildError(AssertionError):
    """What went wrong in another process, as text."""


def in_child(
    work: Callable[..., Any], *arguments: Any, fds: Sequence[int] = (), limit_s: float = 60
) -> Any:
    """Run `work(*arguments)` in a spawned process and return what it returns.

    Where there are `fds`, it is given its own ones as the last argument, a tuple; `work` closes
    them.

    Raises:
        ChildError: it raised, ended without an answer, or took longer than `limit_s`.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_serve, args=(there, work, arguments, len(fds)), daemon=True)
    child.start()
    there.close()
    try:
        assert child.pid is not None
        for fd in fds:
            send_handle(here, fd, child.pid)
        if not here.poll(limit_s):
            raise ChildError(f"{work.__name__} in another process is not over after {limit_s:g} s")
        good, answer = here.recv()
    except (EOFError, OSError) as error:
        child.join(_JOIN_S)
        raise ChildError(
            f"the process of {work.__name__} ended with {child.exitcode} before it answered"
        ) from error
    finally:
        child.join(_JOIN_S)
        if child.is_alive():
            child.kill()
            child.join()
        child.close()
        here.close()
    if not good:
        raise ChildError(answer)
    return answer


def _serve(link: Connection, work: Callable[..., Any], arguments: Any, fds: int) -> None:
    own = tuple(recv_handle(link) for _ in range(fds))
    try:
        answer = True, work(*arguments, *((own,) if fds else ()))
    except BaseException:
        answer = False, traceback.format_exc()
    link.send(answer)
    link.close()


def in_fork(work: Callable[[], Any]) -> None:
    """Run `work()` in a forked process, which ends without running anything else.

    Raises:
        ChildError: it raised, or was killed.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: on purpose
        pid = os.fork()
    if pid == 0:
        text = ""
        try:
            work()
        except BaseException:
            text = traceback.format_exc()
        os.write(writer, text.encode()[:60_000])
        os._exit(1 if text else 0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    if status:
        raise ChildError(text or f"a forked process ended with status {status}")


def until_killed(work: Callable[..., Any], *arguments: Any, messages: int) -> list[Any]:
    """Run `work(*arguments, say)` in a spawned process and kill it (SIGKILL) after so many `say`s.

    Returns all that was said. Raises ChildError when it ends by itself.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_talk, args=(there, work, arguments), daemon=True)
    child.start()
    there.close()
    said: list[Any] = []
    try:
        while len(said) < messages:
            said.append(here.recv())
        child.kill()
        with contextlib.suppress(EOFError):  # that is all
            while True:
                said.append(here.recv())
    except EOFError:
        child.join(_JOIN_S)
        raise ChildError(
            f"the process of {work.__name__} ended with {child.exitcode} after it said {said[-2:]}"
        ) from None
    finally:
        child.kill()
        child.join()
        child.close()
        here.close()
    return said


def _talk(link: Connection, work: Callable[..., Any], arguments: Any) -> None:
    work(*arguments, link.send)
