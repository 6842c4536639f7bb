"""Where a Redis server is: `places` reads a URL, and shows nothing of it in its errors;
`tls_options`.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

from redis.connection import parse_url

from flexkv.errors import ConfigError


def places(url: str, whose: str) -> dict[str, Any]:
    """Return what `url` says: host, port, db, path, username, password, sentinels, service, nodes,
    and `tls`.

    It is redis://[user:password@]host:port/db, rediss:// (TLS), unix://path,
    sentinel://host:port,host:port/service, or cluster://host:port,host:port (Redis Cluster); with
    TLS to all servers sentinels:// and clusters://. TLS takes redis-py's options behind a "?":
    ssl_ca_certs=FILE, ssl_certfile=FILE, ssl_keyfile=FILE.

    Raises:
        ConfigError: it is none of them. Its text is not shown: it may hold a password.
    """
    kind, _, rest = str(url).partition("://")
    try:
        if kind not in ("sentinel", "cluster", "sentinels", "clusters"):
            found = parse_url(url)  # type: ignore[no-untyped-call]
            return {**found, "tls": kind == "rediss"}
        rest, _, query = rest.partition("?")
        where, _, service = rest.partition("/")
        login, _, hosts = where.rpartition("@")
        pairs = [entry.rpartition(":") for entry in hosts.split(",")]
        servers = [(host, int(port)) for host, _, port in pairs]
        if bool(service) != kind.startswith("sentinel") or not all(host for host, _ in servers):
            raise ValueError("no service, or no host")
        options = dict(parse_qsl(query, strict_parsing=bool(query)))
        tls = kind.endswith("s")
        if unknown := [key for key in options if not tls or not key.startswith("ssl_")]:
            raise ValueError(f"{unknown[0]} is no option")
        user, _, password = login.rpartition(":")
        some = {"service": service, "sentinels": servers} if service else {"nodes": servers}
        return {**some, **options, "username": user, "password": password, "tls": tls}
    except ValueError as error:
        raise ConfigError(
            f"{whose}: url must be redis://host:port/db, rediss://..., unix://path, "
            "sentinel://host:port,host:port/service or cluster://host:port,host:port (with TLS "
            "sentinels:// or clusters://, and options ssl_...=... behind a ?); "
            f"a url of kind {kind!r} was given"
        ) from error


def tls_options(found: dict[str, Any]) -> dict[str, Any]:
    """Return those of what `places` returned that are about TLS."""
    return {name: value for name, value in found.items() if name.startswith("ssl_")}
