"""Blocks as objects in S3, GCS, Azure, or a folder that machines share: `ObjectStore`.

`ObjectClient` moves them through obstore, which knows the services, their credentials and retries.
`sweep` keeps what lies below a prefix within `size_cap_bytes`, counting what is really there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url

from flexkv.backends.remote.couriers import Client
from flexkv.backends.remote.settings import RemoteSettings
from flexkv.backends.remote.store import RemoteStore
from flexkv.errors import ConfigError
from flexkv.model import DAMAGED, LANDED, MISSING, Statuses
from flexkv.telemetry import log

_SWEEPS_PER_CAP = 20  # a sweep each time a twentieth of the cap was written


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSettings(RemoteSettings):
    """What may be set for objects.

    `url` is s3://bucket/path, gs://bucket/path, az://container/path or file:///shared/folder;
    `options` are obstore's for that service (endpoint, region, keys); what is not given comes from
    the service's own environment variables and files. Below `prefix` there are at most
    `size_cap_bytes` (0: no limit) of all caches together; the oldest objects leave first.
    """

    url: str
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    size_cap_bytes: int = 0
    connections: int = 8

    def check(self) -> None:
        """See RemoteSettings.check."""
        RemoteSettings.check(self)
        if not isinstance(self.size_cap_bytes, int) or self.size_cap_bytes < 0:
            raise ConfigError(
                f"remote store: size_cap_bytes must be >= 0, got {self.size_cap_bytes!r}"
            )
        self.connect()

    def connect(self) -> Any:
        """Make obstore's store; nothing is asked yet.

        Raises:
            ConfigError: obstore does not take `url` or `options`; their values are not shown.
        """
        remote: dict[str, Any] = {}
        if str(self.url).startswith("file:"):
            remote["mkdir"] = True
        else:
            limit = f"{self.timeout_ms}ms"
            remote["client_options"] = {"timeout": limit, "connect_timeout": limit}
            remote["retry_config"] = {"max_retries": 1}
            if str(self.options.get("endpoint", "")).startswith("http:"):
                remote["client_options"]["allow_http"] = True
        try:
            return from_url(self.url, **remote, **self.options)
        except (BaseError, TypeError, ValueError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"remote store: url or options cannot be used: {reason}") from error


class ObjectStore(RemoteStore):
    """Objects, one for each block. Settings: see `ObjectSettings`."""

    name: ClassVar[str] = "objects"
    settings_type = ObjectSettings
    settings: ObjectSettings

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._unswept_bytes = -1  # -1: nobody has counted yet

    def connect(self) -> Client:
        """Make a client."""
        return ObjectClient(self.settings.connect(), self._wrote)

    def _wrote(self, store: Any, size_bytes: int) -> None:
        """Count what a courier wrote; one of them sweeps when it is time."""
        cap = self.settings.size_cap_bytes
        if not cap:
            return
        with self._lock:
            due = self._unswept_bytes < 0 or self._unswept_bytes + size_bytes > (
                cap // _SWEEPS_PER_CAP
            )
            self._unswept_bytes = 0 if due else self._unswept_bytes + size_bytes
        if due:
            removed = sweep(store, self.settings.prefix, cap)
            if removed:
                log.info("remote.swept", store=self.name, objects=removed)


def sweep(store: Any, prefix: str, cap_bytes: int) -> int:
    """Delete the oldest objects below `prefix` until the rest is no more than `cap_bytes`.

    Returns how many were deleted. Blocks: lists everything.
    """
    found = [entry for page in obstore.list(store, prefix) for entry in page]
    beyond = sum(entry["size"] for entry in found) - cap_bytes
    victims = []
    for entry in sorted(found, key=lambda entry: (entry["last_modified"], entry["path"])):
        if beyond <= 0:
            break
        victims.append(entry["path"])
        beyond -= entry["size"]
    for path in victims:
        try:
            obstore.delete(store, path)
        except FileNotFoundError:
            continue  # another cache swept, too
    return len(victims)


class ObjectClient:
    """Moves objects one after the other."""

    def __init__(self, store: Any, wrote: Any) -> None:
        self._store, self._wrote = store, wrote

    def read(
        self,
        names: Sequence[bytes],
        heads: Sequence[memoryview],
        bodies: Sequence[memoryview],
        statuses: Statuses,
    ) -> None:
        """Get each object."""
        for number, (name, head, body) in enumerate(zip(names, heads, bodies, strict=True)):
            try:
                content = memoryview(obstore.get(self._store, path_of(name)).bytes())
            except FileNotFoundError:
                statuses[number] = MISSING
                continue
            except BaseError as error:
                raise _failure(error) from error
            if len(content) != len(head) + len(body):
                statuses[number] = DAMAGED
                continue
            head[:], body[:] = content[: len(head)], content[len(head) :]
            statuses[number] = LANDED

    def write(
        self,
        names: Sequence[bytes],
        heads: Sequence[memoryview],
        bodies: Sequence[memoryview],
        statuses: Statuses,
    ) -> None:
        """Put each object."""
        for number, (name, head, body) in enumerate(zip(names, heads, bodies, strict=True)):
            try:
                obstore.put(self._store, path_of(name), iter((head, body)), use_multipart=False)
                statuses[number] = LANDED
                self._wrote(self._store, len(head) + len(body))
            except BaseError as error:
                raise _failure(error) from error

    def discard(self, names: Sequence[bytes], statuses: Statuses) -> None:
        """Delete each object that there is."""
        for number, name in enumerate(names):
            try:
                obstore.head(self._store, path_of(name))
                obstore.delete(self._store, path_of(name))
                statuses[number] = LANDED
            except FileNotFoundError:
                statuses[number] = MISSING
            except BaseError as error:
                raise _failure(error) from error

    def close(self) -> None:
        """Nothing: obstore keeps the connections."""


def path_of(name: bytes) -> str:
    """Return the path of a block: prefix:identity:key -> prefix/identity/ke/key, so that no folder
    gets too long.
    """
    prefix, identity, key = name.decode().rsplit(":", 2)
    return f"{prefix}/{identity}/{key[:2]}/{key}"


def _failure(error: BaseError) -> OSError:
    """The first line of what obstore says: the rest is for its developers."""
    return OSError(str(error).partition("\n")[0])
