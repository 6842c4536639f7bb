"""Shared by all tests: helpers of this folder can be imported; no torch, no tests of it."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import structlog

from flexkv import plugins
from flexkv.testing.harness import Unsupported
from flexkv.testing.remote import RedisServer

sys.path.insert(0, str(Path(__file__).parent))
from installed import install

# name -> options: engines that overtake each other, and latencies at random
_SIMULATED = '{"engines": 3, "streams": 4, "latency_us": 20, "jitter_us": 1500, "timeout_ms": 200}'
DEVICES = {
    "cpu": "",
    "simulated": _SIMULATED,
    "simulated_direct": _SIMULATED,
    "cuda_on_fake": '{"timeout_ms": 200, "jitter_us": 1500, "pin_chunk_bytes": 16384}',
}

HEAVY = {"torch", "transformers"}
ABSENT = {name for name in HEAVY if find_spec(name) is None}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Skip a module whose own imports name a package that is not installed."""
    if not ABSENT or collection_path.suffix != ".py":
        return None
    wanted = set()
    for node in ast.parse(collection_path.read_text()).body:
        if isinstance(node, ast.Import):
            wanted |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            wanted.add(node.module.split(".")[0])
    return True if wanted & ABSENT else None


def pytest_addoption(parser: pytest.Parser) -> None:
    """How often managers are killed in test_restart.py, and the device that rigs stand on."""
    parser.addoption("--kills", type=int, default=40, help="kills of test_restart.py")
    parser.addoption("--steps", type=int, default=2000, help="steps of cluster/test_schedules.py")
    parser.addoption("--device", choices=sorted(DEVICES), default="cpu", help="device of rigs")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the device for all managers that do not name one, child processes included."""
    device = config.getoption("--device")
    if DEVICES[device]:
        os.environ |= {"FLEXKV_DEVICE": device, "FLEXKV_DEVICE_OPTIONS": DEVICES[device]}
    if device == "cuda_on_fake":
        _install_fakes(Path(config.rootpath, "build", "fakes"))


def _install_fakes(site: Path) -> None:
    """Let this process and its children find the fake CUDA's entry point."""
    if not site.exists():
        points = {"cuda_on_fake": "fake_cuda.backend:FakeCuda"}
        install(site, "flexkv-fakes", points, {}, plugins.BACKENDS)
    places = [str(site), str(Path(__file__).parent)]
    sys.path[:0] = places
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, before] if before else places)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what once.txt lists, before pytest looks at marks."""
    lines = (Path(__file__).parent / "once.txt").read_text().splitlines()
    once = tuple(line for line in lines if not line.startswith("#"))
    for item in items:
        if item.nodeid.startswith(once):
            item.add_marker(pytest.mark.once)


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    """How many kills were asked for."""
    count: int = request.config.getoption("--kills")
    return count


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Undo `capture_logs`, behind which structlog counts as configured by the application."""
    configured = structlog.is_configured()
    yield
    if not configured:
        structlog.reset_defaults()


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A Redis of the test's own; without the program the test is skipped."""
    try:
        running = RedisServer()
    except Unsupported as reason:
        pytest.skip(str(reason))
    yield running
    running.stop()
