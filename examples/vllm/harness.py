"""What the measurements share: a random model, prompts with shared parts, and servers.

`random_model` - `prompts` - `transfer` (flexkv as vLLM is told of it) - `Server.start`, `wait`,
`idle`, `end` (an OpenAI server of our own; `Server` alone: one that runs already) - `show`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
BLOCK = 32  # tokens; CPUs want a multiple of 32
VOCABULARY = 4096
_START_S, _IDLE_S = 300, 60


def random_model(directory: Path, layers: int, hidden: int) -> Path:
    """Make a Llama with random weights in fp32, without a download; 8 x 1024 are 400 MB."""
    path = directory / "model"
    maker = [sys.executable, str(HERE.parents[1] / "tests" / "vllm" / "models.py"), str(path)]
    subprocess.run([*maker, str(layers), str(hidden), str(VOCABULARY)], check=True)
    return path


def prompts(shared: int, own: int, count: int, seed: object) -> list[list[int]]:
    """Return `count` prompts: one shared part, each with an own part behind it."""
    dice = random.Random(repr(seed))
    head = dice.choices(range(3, 1000), k=shared)
    return [head + dice.choices(range(3, 1000), k=own) for _ in range(count)]


def transfer(
    settings: Mapping[str, Any], name: str = "FlexKVConnector", module: str = ""
) -> dict[str, Any]:
    """Return the kv_transfer_config of an engine with flexkv."""
    return {
        "kv_connector": name,
        "kv_connector_module_path": module or "flexkv.integration.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(settings),
    }


class Server:
    """An OpenAI-compatible server at `url`."""

    def __init__(self, url: str, process: subprocess.Popen[bytes] | None = None) -> None:
        self.url, self._process = url.rstrip("/").removesuffix("/v1"), process

    @classmethod
    def start(
        cls,
        model: Path,
        log: Path,
        options: Sequence[str],
        connector: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Server:
        """Start vLLM's server on a free port; what it says goes to `log`."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port)]
        command += ["--model", str(model), "--host", "127.0.0.1", "--enable-prompt-tokens-details"]
        command += ["--shutdown-timeout", "10"]  # or the engine is killed before it can close
        command += ["--enforce-eager", "--dtype", "float32", "--block-size", str(BLOCK), *options]
        if connector is not None:
            command += ["--kv-transfer-config", json.dumps(connector)]
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(HERE), **(environment or {})},
                start_new_session=True,
            )
        return cls(f"http://127.0.0.1:{port}", process)

    async def wait(self, session: aiohttp.ClientSession) -> str:
        """Wait until it answers; return the model's name.

        Raises:
            RuntimeError: it has ended, or does not answer in time.
        """
        for _ in range(_START_S):
            if self._process is not None and self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}")
            try:
                async with session.get(f"{self.url}/v1/models") as answer:
                    return str((await answer.json())["data"][0]["id"])
            except (aiohttp.ClientConnectionError, aiohttp.ContentTypeError):
                await asyncio.sleep(1)
        raise RuntimeError(f"{self.url} does not answer")

    async def metric(self, session: aiohttp.ClientSession, name: str) -> float:
        """Return a sum over the labels of one of vLLM's metrics; 0 where there is none."""
        async with session.get(f"{self.url}/metrics") as answer:
            text = await answer.text()
        found = re.findall(rf"^vllm:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for value in found)

    async def idle(self, session: aiohttp.ClientSession) -> None:
        """Wait until no request holds a block any more, as those do that are being stored."""
        for _ in range(_IDLE_S * 10):
            if not await self.metric(session, "kv_cache_usage_perc"):
                return
            await asyncio.sleep(0.1)
        raise RuntimeError(f"{self.url} is busy with something else")

    def end(self) -> None:
        """End a server that was started here, and wait for it."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; figures are to the right."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
