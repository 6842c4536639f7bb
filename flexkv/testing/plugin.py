"""The pytest side of the kit: `--flexkv-verify NAME`, `--flexkv-option`, `--flexkv-seed`.

Loaded by every pytest where flexkv is installed, so it imports the kit only when it is asked to
verify something.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_VERIFY = "flexkv.testing.verify"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the kit."""
    group = parser.getgroup("flexkv", "conformance of flexkv plug-ins")
    group.addoption(
        "--flexkv-verify",
        metavar="NAME",
        action="append",
        default=[],
        help="run the conformance kit on an installed plug-in; may be given several times",
    )
    group.addoption(
        "--flexkv-option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a setting for what is verified, or NAME.KEY=VALUE for one plug-in of several",
    )
    group.addoption(
        "--flexkv-seed", type=int, default=0, help="seed of the kit's random numbers (default 0)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Turn `--flexkv-verify` into something to collect."""
    if not config.getoption("--flexkv-verify"):
        return
    found = importlib.util.find_spec(_VERIFY)
    assert found is not None
    assert found.origin is not None
    given = config.args if config.args_source is pytest.Config.ArgsSource.ARGS else []
    config.args = [*given, found.origin]


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what is verified, and with which seed."""
    names = config.getoption("--flexkv-verify")
    seed = config.getoption("--flexkv-seed")
    return [f"flexkv: verifying {', '.join(names)}, seed {seed}"] if names else []


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Collect the plug-ins that are to be verified where `verify.py` is collected."""
    if not parent.config.getoption("--flexkv-verify") or module_path.name != "verify.py":
        return None
    found = importlib.util.find_spec(_VERIFY)
    if found is None or found.origin != str(module_path):
        return None
    made: pytest.Module = _Verified.from_parent(parent, path=module_path, nodeid="flexkv")
    return made


class _Verified(pytest.Module):
    """The test classes of the plug-ins that are to be verified."""

    def collect(self) -> Iterator[pytest.Class]:
        from flexkv.errors import PluginError
        from flexkv.testing.verify import classes_for, read_options

        texts = self.config.getoption("--flexkv-option")
        try:
            for name in self.config.getoption("--flexkv-verify"):
                for tests in classes_for(name, read_options(texts, name)):
                    setattr(self.obj, tests.__name__, tests)
                    yield pytest.Class.from_parent(self, name=tests.__name__)
        except PluginError as error:
            raise self.CollectError(f"--flexkv-verify: {error}") from error


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give tests of the kit a limit for what cannot be cancelled, where pytest-timeout is there."""
    guard = sys.modules.get("flexkv.testing.guard")
    if guard is None or not config.pluginmanager.hasplugin("timeout"):
        return
    for item in items:
        tests = getattr(item, "cls", None)
        if tests is not None and issubclass(tests, guard.KitTests):
            item.add_marker(pytest.mark.timeout(tests.limit_s + 60))


@pytest.fixture
def flexkv_rng(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers that depend on `--flexkv-seed` and the test alone; printed when it fails."""
    seed = request.config.getoption("--flexkv-seed")
    request.node.add_report_section("setup", "flexkv", f"--flexkv-seed {seed}")
    return random.Random(f"{seed} {request.node.originalname}")
