"""Plug-ins: names come from package metadata, code is loaded only when a name is asked for.

`available` (name -> distributions, importing nothing) - `plugins` (also duplicates) - `load`
(the object, checked) - `register` (for tests and embedded use) - `refresh` (forget the scan after
packages changed). Groups: `BACKENDS`, `POLICIES`, `CODECS`, and `HARNESSES` (how the conformance
kit gets at the memory of a plug-in of that name); built-ins use the same entry points.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from types import TracebackType
from typing import Any, Self

from flexkv.errors import PluginError
from flexkv.protocols import API_VERSION, DeviceInfo

BACKENDS = "flexkv.backends"
POLICIES = "flexkv.policies"
CODECS = "flexkv.codecs"
HARNESSES = "flexkv.harnesses"
_VERBS = {  # what the doors of protocols.py ask for, by group: any of the sets is enough
    BACKENDS: (
        ("probe", "open", "make_region", "copy", "aclose"),
        ("probe", "open", "read", "write", "discard", "aclose"),
    ),
    POLICIES: (("open", "inserted", "touched", "removed", "victims"),),
    CODECS: (("encoded_bytes", "encode", "decode"),),
    HARNESSES: (("make", "settings"),),
}
_REGISTERED = "registered in this process"


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry of one group: where it comes from and what it points to."""

    group: str
    name: str
    distribution: str
    target: Any = field(compare=False, repr=False)  # an EntryPoint, or the registered object itself

    def load(self) -> Any:
        """Import the entry point and check it; raises PluginError that names the distribution."""
        where = f"{self.group} plug-in {self.name!r} of {self.distribution}"
        found = self.target
        if isinstance(found, EntryPoint):
            try:
                found = found.load()
            except Exception as error:  # a plug-in's import may fail in any way
                raise PluginError(f"{where} fails to load: {error!r}") from error
        speaks = getattr(found, "flexkv_api", None)
        if speaks != API_VERSION:
            raise PluginError(
                f"{where} speaks API {speaks}, this flexkv speaks {API_VERSION}; "
                "install versions that match"
            )
        gaps = [
            [verb for verb in verbs if not callable(getattr(found, verb, None))]
            for verbs in _VERBS[self.group]
        ]
        if all(gaps):
            missing = ", ".join(sorted(gaps, key=len)[0])
            raise PluginError(f"{where} lacks {missing}; see docs/plugins.md")
        return found

    def devices(self) -> list[DeviceInfo]:
        """Load a backend and ask it what it finds; raises PluginError that names the distribution.

        `probe` must not raise, but it is somebody else's code on somebody else's machine.
        """
        backend = self.load()
        try:
            return list(backend.probe())
        except Exception as error:
            raise PluginError(
                f"{self.group} plug-in {self.name!r} of {self.distribution} cannot say what it "
                f"finds: {error!r}"
            ) from error


class Registration:
    """Keeps a registered plug-in until `close()` or the end of the `with` block."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin

    def close(self) -> None:
        """Take the plug-in out again; calling it twice is fine."""
        with _lock:
            if self._plugin in _registered:
                _registered.remove(self._plugin)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


_lock = threading.RLock()
_registered: list[Plugin] = []
_scanned: dict[str, list[Plugin]] = {}


def _check_group(group: str) -> None:
    if group not in _VERBS:
        raise PluginError(f"{group!r} is no plug-in group; there are {', '.join(_VERBS)}")


def _installed(group: str) -> list[Plugin]:
    """Scan the metadata once per group (2.5 to 13 ms)."""
    if group not in _scanned:
        seen: dict[tuple[str, str, str], Plugin] = {}
        for point in entry_points(group=group):
            version = f" {point.dist.version}" if point.dist else ""
            owner = point.dist.name if point.dist else "an unknown distribution"
            plugin = Plugin(group, point.name, owner + version, point)
            seen.setdefault((point.name, point.value, owner), plugin)
        _scanned[group] = list(seen.values())
    return _scanned[group]


def plugins(group: str) -> list[Plugin]:
    """Return every plug-in of a group, importing none, sorted by name; duplicates are kept."""
    _check_group(group)
    with _lock:
        found = [*_installed(group), *(item for item in _registered if item.group == group)]
    return sorted(found, key=lambda item: (item.name, item.distribution))


def available(group: str) -> dict[str, str]:
    """Return name -> distribution and version; a name that several claim lists them all."""
    names: dict[str, str] = {}
    for item in plugins(group):
        known = names.get(item.name)
        names[item.name] = f"{known} and {item.distribution}" if known else item.distribution
    return names


def load(group: str, name: str) -> Any:
    """Import the plug-in `name` of `group` and return it, usually a class.

    Raises:
        PluginError: the name is unknown (what exists is listed), claimed twice (both distributions
            are named), of another API version, incomplete, or fails to import (cause chained).
    """
    found = [item for item in plugins(group) if item.name == name]
    if not found:
        there = ", ".join(available(group)) or "none"
        raise PluginError(f"no {group} plug-in is called {name!r}; installed: {there}")
    if len(found) > 1:
        owners = " and ".join(item.distribution for item in found)
        raise PluginError(f"{group} plug-in {name!r} comes from {owners}; uninstall all but one")
    return found[0].load()


def register(group: str, name: str, target: Any) -> Registration:
    """Offer `target` under `name` in this process, as an installed plug-in would.

    Raises:
        PluginError: the name is taken.
    """
    with _lock:
        taken = available(group).get(name)
        if taken:
            raise PluginError(f"{group} plug-in {name!r} exists already, from {taken}")
        plugin = Plugin(group, name, _REGISTERED, target)
        _registered.append(plugin)
    return Registration(plugin)


def refresh() -> None:
    """Forget the scanned metadata; the next question scans again."""
    with _lock:
        _scanned.clear()
