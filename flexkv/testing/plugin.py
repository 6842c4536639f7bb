"""The pytest side of the kit: `--flexkv-verify NAME`, `--flexkv-option`, `--flexkv-seed`."""

from __future__ import annotations

import random

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the kit."""
    group = parser.getgroup("flexkv", "conformance of flexkv plug-ins")
    group.addoption(
        "--flexkv-seed", type=int, default=0, help="seed of the kit's random numbers (default 0)"
    )


@pytest.fixture
def flexkv_rng(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers that depend on `--flexkv-seed` and the test alone."""
    seed = request.config.getoption("--flexkv-seed")
    request.node.add_report_section("setup", "flexkv", f"--flexkv-seed {seed}")
    return random.Random(f"{seed} {request.node.originalname}")
