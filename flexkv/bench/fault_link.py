"""A network between two nodes that can be made bad: `Relay`, a TCP relay with a mood.

Moods: "good"; "cut" (nothing comes through, and nobody is told); "slow" (1 KB/s towards the
reader); "garbage" (other bytes towards the reader); "closed" (connections end at once).
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading

_CHUNK, _SLOW_BYTES, _SLOW_S = 1 << 18, 50, 0.05  # 1 KB/s


class Relay:
    """Listens on 127.0.0.1 and passes on to `target` what comes, as far as its mood lets it."""

    def __init__(self, target: int) -> None:
        self.target, self.mood, self._end = target, "good", threading.Event()
        self._changed = threading.Condition()
        self._dice = random.Random(0)
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def feel(self, mood: str) -> None:
        """Change the mood."""
        with self._changed:
            self.mood = mood
            self._changed.notify_all()

    def close(self) -> None:
        """End it, with all of its connections."""
        self._end.set()
        self.feel("good")
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        while not self._end.is_set():
            try:
                reader, _ = self._listener.accept()
            except OSError:
                return
            try:
                owner = socket.create_connection(("127.0.0.1", self.target), 5)
            except OSError:
                reader.close()
                continue
            self._ends += [reader, owner]
            for one, other, answers in ((reader, owner, False), (owner, reader, True)):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                one.settimeout(None)
                threading.Thread(target=self._pass, args=(one, other, answers), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(_CHUNK)) and self.mood != "closed":
                with self._changed:
                    self._changed.wait_for(lambda: self.mood != "cut")
                if answers and self.mood == "garbage":
                    data = self._dice.randbytes(len(data))
                at = 0
                while answers and self.mood == "slow" and at < len(data):
                    target.sendall(data[at : at + _SLOW_BYTES])
                    at += _SLOW_BYTES
                    self._end.wait(_SLOW_S)
                target.sendall(data[at:])
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
