"""Test classes for installed plug-ins, as `pytest --flexkv-verify NAME` runs them.

`classes_for` (name -> one test class per door that the plug-in satisfies) - `read_options`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import pytest

from flexkv import plugins
from flexkv.errors import PluginError
from flexkv.testing.codec import CodecTests
from flexkv.testing.device import DeviceBackendTests
from flexkv.testing.direct import DirectStorageTests
from flexkv.testing.guard import KitTests
from flexkv.testing.harness import (
    CodecHarness,
    DeviceHarness,
    DirectHarness,
    Harness,
    PolicyHarness,
    StorageHarness,
    Unsupported,
)
from flexkv.testing.policy import EvictionPolicyTests
from flexkv.testing.storage import StorageBackendTests

_GROUPS = (plugins.BACKENDS, plugins.POLICIES, plugins.CODECS)
# what a class must have for a door, the tests of that door, and the harness if it brings none
_DOORS: tuple[tuple[str, str, type[KitTests], type[Harness]], ...] = (
    (plugins.BACKENDS, "make_region", DeviceBackendTests, DeviceHarness),
    (plugins.BACKENDS, "read", StorageBackendTests, StorageHarness),
    (plugins.BACKENDS, "read_into", DirectStorageTests, DirectHarness),
    (plugins.POLICIES, "victims", EvictionPolicyTests, PolicyHarness),
    (plugins.CODECS, "encode", CodecTests, CodecHarness),
)


def classes_for(name: str, options: Mapping[str, Any]) -> list[type[KitTests]]:
    """Make the test classes of the plug-in `name`, one per door that it satisfies.

    Args:
        options: settings that the plug-in is opened with.

    Raises:
        PluginError: nothing is called so (what exists is listed), or it cannot be loaded.
    """
    made = []
    for group in _GROUPS:
        if name not in plugins.available(group):
            continue
        plugin = plugins.load(group, name)
        for door, verb, tests, usual in _DOORS:
            if door == group and callable(getattr(plugin, verb, None)):
                made.append(_class(tests, name, partial(_harness, usual, name, plugin, options)))
    if not made:
        there = "; ".join(f"{group}: {', '.join(plugins.available(group))}" for group in _GROUPS)
        raise PluginError(f"no plug-in is called {name!r}; installed: {there}")
    return made


def read_options(texts: Iterable[str], name: str) -> dict[str, Any]:
    """Read `key=value` (for all plug-ins) and `NAME.key=value` texts; values are JSON or text.

    Raises:
        PluginError: a text has no "=".
    """
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise PluginError(f"--flexkv-option {text!r}: write key=value, or NAME.key=value")
        owner, dot, rest = key.partition(".")
        if dot and owner != name:
            continue
        try:
            options[rest if dot else key] = json.loads(value)
        except ValueError:
            options[rest if dot else key] = value
    return options


def _harness(usual: type[Harness], name: str, plugin: Any, options: Mapping[str, Any]) -> Harness:
    """The plug-in's own harness if it brings one that fits the door, else the usual one."""
    kind = usual
    if name in plugins.available(plugins.HARNESSES):
        own = plugins.load(plugins.HARNESSES, name)
        kind = own if issubclass(own, usual) else usual
    if kind is DirectHarness:
        pytest.skip(f"{name} reads from stores by itself, but brings no DirectHarness")
    try:
        return kind(plugin, options)
    except Unsupported as reason:
        pytest.skip(str(reason))


def _class(tests: type[KitTests], name: str, make: Any) -> type[KitTests]:
    @pytest.fixture
    def harness(self: KitTests) -> Harness:
        made: Harness = make()
        return made

    return type(f"{name}.{tests.__name__}", (tests,), {"harness": harness})
