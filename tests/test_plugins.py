"""Plug-ins: found by name without importing, checked when loaded, errors name distributions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from installed import install

from flexkv import plugins
from flexkv.errors import PluginError

GOOD = """
class Policy:
    flexkv_api = {api}
    def open(self, context): ...
    def inserted(self, blocks, now): ...
    def touched(self, blocks, now): ...
    def removed(self, blocks): ...
    def victims(self, count, evictable): ...
"""


DEVICE = """
class Device:
    flexkv_api = 1
    @classmethod
    def probe(cls): {probe}
    def open(self, services): ...
    def make_region(self, kv_caches, spec, axes): ...
    def copy(self, batch): ...
    def aclose(self): ...
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages that only this test sees."""
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.refresh()
    yield tmp_path
    plugins.refresh()


@pytest.fixture
def policy() -> Any:
    namespace: dict[str, Any] = {}
    exec(GOOD.format(api=1), namespace)
    return namespace["Policy"]


def test_names_come_from_metadata_without_importing(site: Path) -> None:
    install(
        site, "odd-policies", {"odd": "odd_one:Policy"}, {"odd_one": "raise RuntimeError('no')"}
    )
    assert plugins.available(plugins.POLICIES)["odd"] == "odd-policies 1.2"
    assert "odd_one" not in sys.modules


def test_a_good_plugin_loads(site: Path) -> None:
    install(site, "good", {"good": "good_one:Policy"}, {"good_one": GOOD.format(api=1)})
    assert plugins.load(plugins.POLICIES, "good").__name__ == "Policy"


def test_unknown_name_lists_what_exists(site: Path) -> None:
    install(site, "good", {"good2": "good_two:Policy"}, {})
    with pytest.raises(PluginError, match=r"'goood'.*installed: .*good2"):
        plugins.load(plugins.POLICIES, "goood")


def test_two_distributions_with_one_name_are_refused_by_name(site: Path) -> None:
    install(site, "first-pack", {"same": "a_pack:Policy"}, {})
    install(site, "second-pack", {"same": "b_pack:Policy"}, {})
    with pytest.raises(PluginError, match=r"first-pack 1\.2 and second-pack 1\.2"):
        plugins.load(plugins.POLICIES, "same")
    assert plugins.available(plugins.POLICIES)["same"] == "first-pack 1.2 and second-pack 1.2"


def test_other_api_version_is_refused(site: Path) -> None:
    install(site, "newer", {"newer": "newer_one:Policy"}, {"newer_one": GOOD.format(api=2)})
    with pytest.raises(PluginError, match=r"newer 1\.2 speaks API 2, this flexkv speaks 1"):
        plugins.load(plugins.POLICIES, "newer")


def test_missing_verbs_are_named(site: Path) -> None:
    source = "class Policy:\n    flexkv_api = 1\n    def open(self, context): ...\n"
    install(site, "half", {"half": "half_one:Policy"}, {"half_one": source})
    with pytest.raises(PluginError, match=r"half 1\.2 lacks inserted, touched, removed, victims"):
        plugins.load(plugins.POLICIES, "half")


@pytest.mark.parametrize(
    ("module", "target", "cause"),
    [
        ("raise RuntimeError('no driver')", "bad{n}:Policy", RuntimeError),
        ("", "bad{n}:Policy", AttributeError),
        (None, "not_there:Policy", ModuleNotFoundError),
    ],
)
def test_import_errors_name_the_distribution_and_keep_the_cause(
    site: Path, module: str | None, target: str, cause: type[Exception]
) -> None:
    name = f"bad{cause.__name__.lower()}"
    target = target.format(n=cause.__name__.lower())
    install(site, "bad-pack", {"bad": target}, {} if module is None else {name: module})
    with pytest.raises(PluginError, match=r"bad-pack 1\.2 fails to load") as caught:
        plugins.load(plugins.POLICIES, "bad")
    assert isinstance(caught.value.__cause__, cause)


def test_the_scan_is_remembered_until_refreshed(site: Path) -> None:
    assert "late" not in plugins.available(plugins.POLICIES)
    install(site, "late", {"late": "late_one:Policy"}, {})
    assert "late" not in plugins.available(plugins.POLICIES)
    plugins.refresh()
    assert "late" in plugins.available(plugins.POLICIES)


def test_registering_for_a_while(policy: Any) -> None:
    with plugins.register(plugins.POLICIES, "mine", policy):
        assert plugins.load(plugins.POLICIES, "mine") is policy
        with pytest.raises(PluginError, match="exists already"):
            plugins.register(plugins.POLICIES, "mine", policy)
    assert "mine" not in plugins.available(plugins.POLICIES)
    registration = plugins.register(plugins.POLICIES, "mine", policy)
    registration.close()
    registration.close()
    assert "mine" not in plugins.available(plugins.POLICIES)


def test_registering_over_an_installed_name_is_refused(site: Path, policy: Any) -> None:
    install(site, "good", {"taken": "good_three:Policy"}, {})
    with pytest.raises(PluginError, match=r"from good 1\.2"):
        plugins.register(plugins.POLICIES, "taken", policy)


def test_unknown_group_is_refused() -> None:
    with pytest.raises(PluginError, match=r"flexkv\.backends, flexkv\.policies, flexkv\.codecs"):
        plugins.available("flexkv.backend")


def test_listing_the_built_ins_imports_neither_them_nor_torch() -> None:
    program = (
        "import sys; from flexkv import plugins\n"
        "names = plugins.available(plugins.BACKENDS) | plugins.available(plugins.POLICIES)\n"
        "assert {'cpu', 'disk', 'lru', 'filo'} <= set(names), names\n"
        "loaded = [m for m in sys.modules if m.startswith(('torch', 'flexkv.backends.cpu'))]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_probe_that_raises_names_its_distribution(site: Path) -> None:
    source = DEVICE.format(probe="raise RuntimeError('driver too old')")
    install(site, "rash", {"rash": "rash_one:Device"}, {"rash_one": source}, plugins.BACKENDS)
    (rash,) = (item for item in plugins.plugins(plugins.BACKENDS) if item.name == "rash")
    with pytest.raises(PluginError, match=r"'rash' of rash 1\.2 .*driver too old") as caught:
        rash.devices()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_doctor_shows_what_each_plugin_found_and_bad_ones_disturb_nobody(tmp_path: Path) -> None:
    """A fresh interpreter that sees good and bad distributions side by side."""
    devices = {
        "fine": "return [__import__('flexkv').protocols.DeviceInfo('card 0', 1 << 30)]",
        "bare": "return []",
        "rash": "raise RuntimeError('driver too old')",
    }
    for name, probe in devices.items():
        module = {f"{name}_device": DEVICE.format(probe=probe)}
        install(tmp_path, name, {name: f"{name}_device:Device"}, module, plugins.BACKENDS)
    install(
        tmp_path, "newer", {"newer": "newer_policy:Policy"}, {"newer_policy": GOOD.format(api=2)}
    )
    install(tmp_path, "one", {"twice": "fine_policy:Policy"}, {"fine_policy": GOOD.format(api=1)})
    install(tmp_path, "two", {"twice": "fine_policy:Policy"}, {})
    install(
        tmp_path, "broken", {"broken": "broken_policy:Policy"}, {"broken_policy": "import nope"}
    )
    ran = subprocess.run(
        [sys.executable, "-c", "from flexkv.cli import app; app()", "doctor", "--json"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    told = {item["subject"]: item for item in json.loads(ran.stdout)["findings"]}
    assert told["backends: fine"]["detail"] == "fine 1.2; devices: card 0 (1 GiB)"
    assert told["backends: bare"]["detail"] == "bare 1.2; no device here"
    bad = {
        "backends: rash": r"rash 1.2 cannot say what it finds: RuntimeError('driver too old')",
        "policies: newer": "newer 1.2 speaks API 2",
        "policies: twice": "comes from one 1.2 and two 1.2",
        "policies: broken": "broken 1.2 fails to load: ModuleNotFoundError",
    }
    for subject, text in bad.items():
        assert told[subject]["state"] == "unusable"
        assert text in told[subject]["detail"]
    assert {told[f"backends: {name}"]["state"] for name in ("cpu", "disk")} == {"ok"}
    assert told["policies: lru"]["state"] == "ok"


def test_listing_imports_no_plugin_of_any_distribution() -> None:
    """Those of plugins/ are installed for the tests as anybody's would be."""
    program = (
        "import sys; from flexkv import plugins\n"
        "names = plugins.available(plugins.BACKENDS)\n"
        "assert {'simulated', 'simulated_direct', 'example'} <= set(names), names\n"
        "loaded = [m for m in sys.modules if m.startswith(('flexkv_', 'flexkv.backends.'))]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
