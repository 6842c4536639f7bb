"""Talking to the server: `Link.ask`, `ask_all` (commands in, plain answers out), `aclose`.

redis-py finds the master behind Sentinels, follows the slots of Redis Cluster, and speaks TLS.
Whatever keeps an answer from coming is a `LinkError`; it is not repeated here, because who asked
must first see what the server still has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import anyio
from redis.asyncio import (
    Connection,
    ConnectionPool,
    Redis,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    RedisClusterException,
    RedisError,
    ResponseError,
)

from flexkv.backends.remote.urls import tls_options
from flexkv.cluster.settings import ClusterSettings
from flexkv.errors import FlexKVError

Word: TypeAlias = bytes | str | int | float
_CLOSE_S = 0.5
_NO_ANSWER = (RedisError, RedisClusterException, OSError, EOFError)


class LinkError(FlexKVError):
    """The server did not answer, or (`refused`) answered with an error."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


class Link:
    """A pool of connections to the server; nothing is connected before the first command.

    `patience_ms` is how long commands may block on the server, on top of the time limit.
    """

    def __init__(self, settings: ClusterSettings, *, patience_ms: int = 0) -> None:
        self._client, self._sentinels = _client(settings, patience_ms)
        self.sent_bytes = 0  # of commands, and
        self.received_bytes = 0  # of the long texts in answers, without what Redis adds
        self.commands = 0

    async def ask(self, *words: Word) -> Any:
        """Send a command and return its answer.

        Raises:
            LinkError: there is none, or it is an error.
        """
        self._count(words)
        try:
            answer = await self._client.execute_command(*words)
        except _NO_ANSWER as error:
            raise _wrapped(error) from error
        self.received_bytes += _weight(answer)
        return answer

    async def ask_all(self, commands: Sequence[tuple[Word, ...]]) -> list[Any]:
        """Send commands at once; return their answers.

        Raises:
            LinkError: one of them has none, or it is an error. Others may have been carried out.
        """
        pipeline: Any = (
            self._client.pipeline()
            if isinstance(self._client, RedisCluster)
            else self._client.pipeline(transaction=False)
        )
        for words in commands:
            self._count(words)
            pipeline.execute_command(*words)
        try:
            answers: list[Any] = await pipeline.execute()
        except _NO_ANSWER as error:
            raise _wrapped(error) from error
        self.received_bytes += _weight(answers)
        return answers

    async def aclose(self) -> None:
        """Close all connections."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_S):
            await self._client.aclose()
            for sentinel in self._sentinels:
                await sentinel.aclose()

    def _count(self, words: tuple[Word, ...]) -> None:
        self.commands += 1
        self.sent_bytes += sum(
            len(word) if isinstance(word, bytes | str) else len(str(word)) for word in words
        )


def _client(
    settings: ClusterSettings, patience_ms: int
) -> tuple[Redis | RedisCluster, list[Redis]]:
    """A client for the data, and those that it asks where the data is."""
    where = settings.places()
    timeout_s = settings.timeout_ms / 1e3
    options: dict[str, Any] = {
        "username": settings.username or where.get("username") or None,
        "password": settings.secret() or where.get("password") or None,
        "socket_timeout": timeout_s + patience_ms / 1e3,
        "socket_connect_timeout": timeout_s,
        "protocol": 2,
    }
    once = Retry(NoBackoff(), 0)
    tls = tls_options(where)
    several = tls | {"ssl": True} if where["tls"] else {}  # as clients of many servers take it
    if "nodes" in where:
        options |= several
        nodes = [ClusterNode(host, port) for host, port in where["nodes"]]
        return RedisCluster(startup_nodes=nodes, **options), []
    options |= {"retry": once, "db": where.get("db") or 0}
    if "sentinels" in where:
        watch: Any = Sentinel(  # type: ignore[no-untyped-call]
            where["sentinels"],
            sentinel_kwargs={"socket_timeout": timeout_s} | several,
            **options | several,
        )
        master: Redis = watch.master_for(where["service"])
        return master, watch.sentinels
    if "path" in where:
        kind: Any = UnixDomainSocketConnection
        options |= {"path": where["path"]}
    else:
        kind = SSLConnection if where["tls"] else Connection
        options |= {"host": where.get("host", "127.0.0.1"), "port": where.get("port", 6379)}
        options |= tls
    return Redis.from_pool(ConnectionPool(connection_class=kind, **options)), []


def _wrapped(error: BaseException) -> LinkError:
    """Say what is wrong, without anything that was sent."""
    if isinstance(error, AuthenticationError):
        return LinkError("the server refuses the user or the password", refused=True)
    text = str(error)[:200]
    if isinstance(error, ResponseError):
        return LinkError(f"the server refuses a command: {text}", refused=True)
    what = f"{type(error).__name__}: {text}"
    return LinkError(f"the server does not answer: {what}", refused=False)


def _weight(answer: Any) -> int:
    if isinstance(answer, bytes | str):
        return len(answer)
    if isinstance(answer, list | tuple):
        return sum(_weight(item) for item in answer)
    if isinstance(answer, dict):
        return sum(_weight(key) + _weight(value) for key, value in answer.items())
    return 0
