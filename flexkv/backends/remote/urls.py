"""Where a Redis server is: `places` reads a URL, and shows nothing of it in its errors."""

from __future__ import annotations

from typing import Any

from redis.connection import parse_url

from flexkv.errors import ConfigError


def places(url: str, whose: str) -> dict[str, Any]:
    """Return what `url` says: host, port, db, path, username, password, sentinels, service, nodes,
    and `tls`.

    It is redis://[user:password@]host:port/db, rediss:// (TLS), unix://path,
    sentinel://host:port,host:port/service, or cluster://host:port,host:port (Redis Cluster).

    Raises:
        ConfigError: it is none of them. Its text is not shown: it may hold a password.
    """
    kind, _, rest = str(url).partition("://")
    try:
        if kind not in ("sentinel", "cluster"):
            found = parse_url(url)  # type: ignore[no-untyped-call]
            return {**found, "tls": kind == "rediss"}
        where, _, service = rest.partition("/")
        login, _, hosts = where.rpartition("@")
        pairs = [entry.rpartition(":") for entry in hosts.split(",")]
        servers = [(host, int(port)) for host, _, port in pairs]
        if bool(service) != (kind == "sentinel") or not all(host for host, _ in servers):
            raise ValueError("no service, or no host")
        user, _, password = login.rpartition(":")
        some = {"service": service, "sentinels": servers} if service else {"nodes": servers}
        return {**some, "username": user, "password": password, "tls": False}
    except ValueError as error:
        raise ConfigError(
            f"{whose}: url must be redis://host:port/db, rediss://..., unix://path, "
            "sentinel://host:port,host:port/service or cluster://host:port,host:port; "
            f"a url of kind {kind!r} was given"
        ) from error
