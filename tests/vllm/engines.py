"""vLLM engines for the tests: `Engine` (a process that runs one), `prompt`, `EXTERNAL`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HERE = Path(__file__).parent
BLOCK = 32
MODULE = {
    "kv_connector": "FlexKVConnector",
    "kv_connector_module_path": "flexkv.integration.vllm.connector",
}
BUILT_IN = {"kv_connector": "FlexKVConnectorV1"}


def prompt(count: int, seed: int = 0, vocab: int = 1000) -> list[int]:
    """Tokens that depend on the seed from the first one on."""
    return [3 + (i * 7919 + seed * 104729 + (seed * i) % 13) % vocab for i in range(count)]


def connector(how: dict[str, str] | None = None, **settings: Any) -> dict[str, Any]:
    """The kv_transfer_config of an engine with flexkv."""
    small = {"host_cache_bytes": "64MiB", "huge_pages": False}
    return {**(how or MODULE), "kv_role": "kv_both", "kv_connector_extra_config": small | settings}


def spoil(directory: Path) -> None:
    """Change one byte in the middle of what is stored there."""
    (path,) = directory.rglob("flexkv.data")
    with path.open("r+b") as file:
        used = []
        for place in range(0, path.stat().st_size, 1 << 16):
            file.seek(place)
            if any(page := file.read(4096)):
                used.append(place + next(i for i, byte in enumerate(page) if byte))
        file.seek(used[len(used) // 2])
        (byte,) = file.read(1)
        file.seek(used[len(used) // 2])
        file.write(bytes([byte ^ 0xFF]))


def check_idle(engine: Any) -> None:
    """Nothing is pinned or under way, and vLLM can empty its cache."""
    assert engine.settle()
    manager = engine.usage()["manager"]
    idle = {name: manager[name] for name in ("plans", "transfers", "pinned", "tickets")}
    assert idle == dict.fromkeys(idle, 0)
    assert engine.reset_local()


class Engine:
    """One engine in its own process: `with Engine(model, ...) as engine: engine.generate(...)`."""

    def __init__(
        self,
        model: Path,
        transfer: dict[str, Any] | None = None,
        *,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._options = {
            "model": str(model),
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "dtype": "float32",
            "max_model_len": 4096,
            "block_size": BLOCK,
            "max_num_batched_tokens": 512,
            "disable_log_stats": False,
            **({"kv_transfer_config": transfer} if transfer else {}),
            **options,
        }
        self._killed = False
        self._environment = {**os.environ, **(environment or {})}

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "engine_child.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
        )
        try:
            self._say(self._options)
            assert self._hear() == "ready"
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.close()
            if kind is None and not self._killed:
                assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    def kill(self) -> None:
        """SIGKILL, as a crash would end it."""
        self._killed = True
        self._process.kill()
        self._process.wait()

    def __getattr__(self, verb: str) -> Any:
        def call(**arguments: Any) -> Any:
            self._say({"verb": verb, "with": arguments})
            return self._hear()

        return call

    def _say(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the engine ended with {self._process.poll()}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["ok"]
