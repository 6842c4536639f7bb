"""Who may import whom: the table of rooms is checked against the imports in the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flexkv

PACKAGE = Path(flexkv.__file__).parent

VOCABULARY = "model errors"
BRAIN = (
    "keys alone index groups order pool tier hints holds reads ledger spills offers prompts "
    "routes planned planner layerwise coding tiercodec estimates worth cuts brain"
)
BODY = (
    "completion memory lanes waiting carriers admission engine background events plans request "
    "encodedstore stack hosting transfer"
)
# room -> rooms it may import besides itself; `backends.disk` is part of the room `backends`
MAY_IMPORT = {
    "errors": "",
    "model": "errors",
    "compat": VOCABULARY,
    "sources": f"compat {VOCABULARY}",
    "clusterconfig": f"compat {VOCABULARY}",
    "config": f"clusterconfig sources compat {VOCABULARY}",
    "protocols": VOCABULARY,
    "plugins": "protocols errors",
    "metrics": "",
    "telemetry": "metrics",
    "_core": "",
    "keys": f"_core {VOCABULARY}",
    "pool": f"_core {VOCABULARY}",
    "order": f"_core protocols {VOCABULARY}",
    "alone": f"_core order {VOCABULARY}",
    "index": f"_core alone order protocols {VOCABULARY}",
    "groups": f"index keys {VOCABULARY}",
    "tier": f"index pool {VOCABULARY}",
    "holds": f"index {VOCABULARY}",
    "hints": f"groups holds index tier {VOCABULARY}",
    "reads": f"tier {VOCABULARY}",
    "ledger": f"groups hints index pool reads tier protocols {VOCABULARY}",
    "spills": f"index ledger {VOCABULARY}",
    "offers": f"ledger {VOCABULARY}",
    "prompts": f"groups index tier {VOCABULARY}",
    "planned": VOCABULARY,
    "planner": "groups index pool tier ledger planned prompts routes spills protocols "
    f"{VOCABULARY}",
    "routes": f"ledger tier {VOCABULARY}",
    "layerwise": VOCABULARY,
    "estimates": "",
    "worth": f"estimates {VOCABULARY}",
    "cuts": f"groups planner worth {VOCABULARY}",
    # names the policies: the only part of the brain that loads plug-ins
    # what a codec costs and saves: figures, no plug-in
    "coding": VOCABULARY,
    # how many slots a tier has depends on its codec: a plug-in
    "tiercodec": f"config plugins protocols {VOCABULARY}",
    "brain": f"config plugins hints index pool tier tiercodec ledger planner worth {VOCABULARY}",
    "policies": f"_core protocols {VOCABULARY}",
    "completion": f"_core {VOCABULARY}",
    "memory": f"_core {VOCABULARY}",
    "lanes": "completion errors model pool",
    "waiting": "completion errors",
    "carriers": "completion",
    "admission": f"config lanes {VOCABULARY}",
    # no backend, no index; whoever weighs fetching is told how long batches took
    "engine": f"completion lanes pool protocols telemetry waiting worth {VOCABULARY}",
    "backends": f"_core protocols completion memory telemetry {VOCABULARY}",
    "codecs": f"_core protocols completion memory telemetry {VOCABULARY}",
    "ranks": f"_core backends completion memory plugins protocols telemetry {VOCABULARY}",
    "events": f"index waiting {VOCABULARY}",
    "background": f"engine ledger offers planner index protocols telemetry waiting {VOCABULARY}",
    "transfer": f"completion planned protocols waiting {VOCABULARY}",
    "plans": f"brain completion cuts groups telemetry transfer waiting {VOCABULARY}",
    "request": f"_core keys engine planner telemetry transfer {VOCABULARY}",
    # a store before a store; its codecs run in threads
    "encodedstore": "coding completion lanes memory pool protocols telemetry tiercodec "
    f"{VOCABULARY}",
    # several machines as one cache: what the others hold, and how it comes over
    "cluster": f"_core backends completion config engine events index lanes ledger memory order "
    f"planner plans protocols telemetry tier transfer waiting {VOCABULARY}",
    "stack": f"cluster config traces plugins protocols telemetry {BRAIN} {BODY} {VOCABULARY}",
    "hosting": f"cluster config plugins protocols telemetry {BRAIN} {BODY} {VOCABULARY}",
    "ahead": f"config plugins protocols telemetry {BRAIN} {BODY} {VOCABULARY}",
    "manager": f"_core ahead config plugins protocols telemetry {BRAIN} {BODY} {VOCABULARY}",
    "cold": f"keys transfer {VOCABULARY}",
    "threads": "",
    # data that the simulator, the bench and the commands share: no body, no manager
    "traces": VOCABULARY,
    "sync": f"ahead groups manager config events protocols threads transfer {VOCABULARY}",
    "__init__": f"cold manager sync config events transfer {VOCABULARY}",
    # the same brain as the data plane, never its body: no loop, no backend
    "sim": f"brain traces codecs config plugins protocols {BRAIN} {VOCABULARY}",
    "bench": "*",
    "cli": "*",
    "integration": "cold manager sync config events transfer protocols ranks metrics telemetry "
    f"{VOCABULARY}",
    "testing": "*",
}
# package -> rooms that may import it
OUTSIDE = {
    "asyncio": "completion manager sync integration testing",
    "anyio": "completion manager sync lanes waiting carriers engine background plans request stack "
    "encodedstore hosting transfer backends codecs cluster ranks integration testing cli bench",
    "torch": "backends integration testing",
    "transformers": "integration",
    "redis": "backends cluster",
    "mooncake": "backends",
    "structlog": "telemetry",
    "prometheus_client": "telemetry integration",
    "typer": "cli",
    "rich": "cli testing",
    "pickle": "",
    "time": "completion ranks bench cli integration testing",
    "random": "testing bench cli",
}


def room_of(relative: Path) -> str:
    return relative.parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, full module name) of everything that is imported when the program runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from imports(ast.Module(node.orelse, []))
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if module == "flexkv":
                yield from ((node.lineno, f"flexkv.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module
        else:
            yield from imports(node)


def violations(package: Path) -> list[str]:
    """Hold every module below `package` against the tables."""
    found = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        room = room_of(relative)
        if room not in MAY_IMPORT:
            found.append(f"{relative}: give the room {room!r} a place in MAY_IMPORT")
            continue
        allowed = set(MAY_IMPORT[room].split())
        for line, name in imports(ast.parse(path.read_text(), str(path))):
            top, _, rest = name.partition(".")
            where = f"{relative}:{line} imports {name}"
            if top == "":
                found.append(f"{where}: relative imports are not used here")
            elif top != "flexkv":
                if top in OUTSIDE and room not in OUTSIDE[top].split():
                    found.append(where)
            elif "*" not in allowed and rest.partition(".")[0] not in {*allowed, room}:
                found.append(where)
    return found


def test_rooms_keep_to_their_doors() -> None:
    assert violations(PACKAGE) == []


def test_only_the_front_doors_know_the_manager() -> None:
    knowing = {
        room_of(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for _, name in imports(ast.parse(path.read_text()))
        if name == "flexkv.manager"
    }
    assert knowing <= {"__init__", "sync", "cli", "bench", "integration", "ranks"}


@pytest.mark.parametrize(
    ("module", "line", "what"),
    [
        ("planner.py", "import asyncio", "imports asyncio"),
        ("planner.py", "from flexkv.engine import Engine", "imports flexkv.engine"),
        ("policies/lru.py", "import time", "imports time"),
        ("engine.py", "from flexkv.backends.cpu import CpuBackend", "imports flexkv.backends.cpu"),
        ("engine.py", "from flexkv import index", "imports flexkv.index"),
        ("backends/cpu.py", "def f():\n    from flexkv.manager import KVManager", "flexkv.manager"),
        ("keys.py", "from . import index", "relative"),
        ("config.py", "import structlog", "imports structlog"),
        ("parlour.py", "", "give the room 'parlour' a place"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, module: str, line: str, what: str) -> None:
    planted = tmp_path / module
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(f"{line}\n")
    found = violations(tmp_path)
    assert len(found) == 1
    assert what in found[0]


def test_imports_for_type_checkers_are_free(tmp_path: Path) -> None:
    (tmp_path / "protocols.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from flexkv.memory import Arena\n"
        "else:\n    import torch\n"
    )
    assert violations(tmp_path) == ["protocols.py:5 imports torch"]


def test_importing_flexkv_loads_neither_torch_nor_much_else() -> None:
    program = (
        "import sys; before = set(sys.modules); import flexkv\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'structlog', 'redis', 'yaml', 'asyncio'}\n"
        "print(sorted(heavy & (set(sys.modules) - before)))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-I", "-c", program],
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert answer.stdout.strip() == "[]"


def test_using_the_whole_public_face_loads_no_torch() -> None:
    program = (
        "import sys, flexkv\n"
        "missing = [name for name in flexkv.__all__ if not hasattr(flexkv, name)]\n"
        "assert not missing, missing\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-I", "-c", program], check=True, timeout=60)


def test_public_names_are_listed_and_others_refused() -> None:
    assert set(flexkv.__all__) <= set(dir(flexkv))
    with pytest.raises(AttributeError, match="no attribute 'KVManger'"):
        _ = flexkv.KVManger
