"""The OpenAI server: API, engine core and worker are processes; TP = 2 has two workers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import BLOCK, BUILT_IN, MODULE, connector, prompt

from flexkv.backends.disk import format as disk_format

pytestmark = [pytest.mark.timeout(600)]
LONG, ANSWER = 1500, 16
WHOLE = LONG // BLOCK * BLOCK


class Server:
    """A running server; `ask` a completion, `reset` its own prefix cache, read its `metrics`."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.base, self.process = f"http://127.0.0.1:{port}", process

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            self.base + path,
            data=json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read() or b"{}")

    def ask(self, tokens: list[int], **more: Any) -> tuple[list[str], int]:
        """The answer's tokens and how many prompt tokens came from a cache."""
        body = {"model": "tiny", "prompt": tokens, "max_tokens": ANSWER, "temperature": 0}
        body |= {"ignore_eos": True, "logprobs": 0, "return_tokens_as_token_ids": True}
        answer = self.post("/v1/completions", body | more)
        details = answer["usage"].get("prompt_tokens_details") or {}
        return answer["choices"][0]["logprobs"]["tokens"], details.get("cached_tokens") or 0

    def reset(self) -> None:
        """Empty vLLM's own prefix cache, once the last saves have let go of their blocks."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            before = self.metric("vllm:kv_cache_usage_perc")
            self.post("/reset_prefix_cache")
            if before == 0:
                return
            threading.Event().wait(0.1)
        raise AssertionError("blocks stay in use")

    def text(self) -> str:
        with urllib.request.urlopen(self.base + "/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """A metric, summed over its labels unless the name has some."""
        labels = "" if "{" in name else r"(?:{[^}]*})?"
        pattern = rf"^{re.escape(name)}{labels} ([0-9.e+-]+)$"
        found = re.findall(pattern, self.text(), re.MULTILINE)
        return sum(float(value) for value in found)

    def workers(self) -> list[int]:
        """Processes below the engine core, by their titles."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    title = (entry / "cmdline").read_bytes().decode(errors="replace")
                    group = os.getpgid(int(entry.name))
                except (OSError, ProcessLookupError):
                    continue
                if "VLLM::Worker" in title and group == os.getpgid(self.process.pid):
                    found.append(int(entry.name))
        return sorted(found)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serve(
    model: Path, transfer: dict[str, Any], *more: str, end: int = signal.SIGTERM, **environment: str
) -> Iterator[Server]:
    """A server, ended by this signal to all its processes."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enforce-eager", "--dtype", "float32", "--block-size", str(BLOCK)]
    command += ["--max-model-len", "4096", "--max-num-batched-tokens", "512"]
    command += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)]
    process = subprocess.Popen(
        [*command, *more],
        env={**os.environ, "VLLM_SERVER_DEV_MODE": "1", **environment},
        start_new_session=True,
    )
    try:
        server = Server(port, process)
        deadline = time.monotonic() + 240
        while True:
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server did not start"
            try:
                urllib.request.urlopen(server.base + "/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                threading.Event().wait(0.5)
        yield server
    finally:
        with suppress(ProcessLookupError):  # it ended by itself
            os.killpg(process.pid, end)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        wait_until_gone(process.pid)


def wait_until_gone(group: int) -> None:
    """Wait until no process of the group is left; they let go of the disk when they end."""
    deadline = time.monotonic() + 30
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        assert time.monotonic() < deadline, "processes of the server stay"
        threading.Event().wait(0.1)


def reuse(server: Server) -> list[str]:
    """Cold, local hit, reload, another tenant. Returns the answer."""
    tokens = prompt(LONG)
    cold, cached = server.ask(tokens, cache_salt="a")
    assert cached == 0
    hit, cached = server.ask(tokens, cache_salt="a")
    assert cached == WHOLE
    server.reset()
    again, cached = server.ask(tokens, cache_salt="a")
    assert cached == WHOLE
    assert cold == hit == again
    assert server.metric("vllm:external_prefix_cache_hits_total") == WHOLE
    server.reset()
    other, cached = server.ask(tokens, cache_salt="b")
    assert (other, cached) == (cold, 0)
    return cold


def on_disk(directory: Path) -> dict[str, Any]:
    return {"disk_cache_bytes": "64MiB", "disk_dirs": [str(directory)], "model": "tiny"}


def wait_until_stored(directory: Path, blocks: int) -> None:
    """Wait until the records of so many blocks are in the files."""
    deadline = time.monotonic() + 20
    while stored(directory) < blocks:
        assert time.monotonic() < deadline, "the blocks do not reach the disk"
        threading.Event().wait(0.1)


def stored(directory: Path) -> int:
    total = 0
    for path in directory.rglob(disk_format.RECORDS_NAME):
        content = path.read_bytes()
        superblock = disk_format.Superblock.decode(content[: disk_format.SUPERBLOCK_BYTES])
        rest = bytearray(content[disk_format.SUPERBLOCK_BYTES :])
        states = disk_format.check(np.frombuffer(rest, disk_format.RECORD), 0, superblock.seed)
        total += int(np.count_nonzero(states == disk_format.GOOD))
    return total


@pytest.mark.parametrize(
    ("how", "end"),
    [(MODULE, signal.SIGKILL), (BUILT_IN, signal.SIGTERM)],
    ids=["module-killed", "built-in-terminated"],
)
def test_a_served_prompt_comes_back_with_the_same_answer_after_a_restart_too(
    tiny: Path, tmp_path: Path, how: dict[str, str], end: int
) -> None:
    transfer = connector(how, **on_disk(tmp_path / "ssd"))
    with serve(tiny, transfer, end=end) as server:
        expected = reuse(server)
        wait_until_stored(tmp_path / "ssd", 2 * WHOLE // BLOCK)
    with serve(tiny, transfer) as server:
        assert server.ask(prompt(LONG), cache_salt="a") == (expected, WHOLE)
        assert server.metric("vllm:external_prefix_cache_hits_total") == WHOLE
        assert server.ask(prompt(LONG), cache_salt="c") == (expected, 0)


def test_what_flexkv_counts_is_among_the_servers_metrics(tiny: Path, tmp_path: Path) -> None:
    port = free_port()
    disk = {"disk_cache_bytes": "64MiB", "disk_dirs": [str(tmp_path / "ssd")], "model": "tiny"}
    with serve(tiny, connector(metrics_port=port, **disk)) as server:
        assert server.metric("vllm:flexkv_loads_total") == 0
        assert "# HELP vllm:flexkv_loads_total loads that vLLM asked for" in server.text()
        reuse(server)
        assert server.ask(prompt(LONG), cache_salt="a")[1] == WHOLE  # a second load
        blocks = 2 * WHOLE // BLOCK
        expected = {
            "vllm:flexkv_loads_total": 2,
            "vllm:flexkv_asked_tokens_total": 2 * WHOLE,
            "vllm:flexkv_loaded_tokens_total": 2 * WHOLE,
            "vllm:flexkv_failed_tokens_total": 0,
            "vllm:flexkv_load_seconds_count": 2,
            "vllm:flexkv_tier_hit_blocks_total": blocks,
            "vllm:flexkv_loaded_blocks_total": blocks,
        }
        assert {name: server.metric(name) for name in expected} == expected
        for name in (
            "vllm:flexkv_saves_total",
            "vllm:flexkv_saved_tokens_total",
            "vllm:flexkv_queried_blocks_total",
            "vllm:flexkv_stored_blocks_total",
            'vllm:flexkv_transfer_bytes_total{engine="0",model_name="tiny",source="device",target="host"}',
            'vllm:flexkv_transfer_bytes_total{engine="0",model_name="tiny",source="host",target="disk"}',
            'vllm:flexkv_tier_capacity_blocks{engine="0",model_name="tiny",tier="disk"}',
        ):
            assert server.metric(name) > 0, name
        assert server.metric("vllm:flexkv_load_seconds_sum") < 5
        # the manager's own collector, where the engine's core runs
        own = Server(port, server.process)
        assert own.metric("flexkv_loaded_blocks_total") == blocks
        assert own.metric('flexkv_transfer_seconds_count{kind="get",part="exposed"}') == 2


def test_two_ranks_hold_one_block_together_stalled_killed_and_restarted(
    tiny: Path, tmp_path: Path
) -> None:
    transfer = connector(**on_disk(tmp_path / "ssd"))
    settings = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1"}
    two = ("--tensor-parallel-size", "2")
    with serve(tiny, transfer, *two, **settings) as server:
        expected = reuse(server)
        server.reset()
        workers = server.workers()
        assert len(workers) == 2
        answers: list[tuple[list[str], int]] = []
        asking = threading.Thread(
            target=lambda: answers.append(server.ask(prompt(LONG), cache_salt="a"))
        )
        os.kill(workers[1], signal.SIGSTOP)
        try:
            asking.start()
            threading.Event().wait(3)  # three times what it may be silent
        finally:
            os.kill(workers[1], signal.SIGCONT)
        asking.join(60)
        assert [tokens for tokens, _ in answers] == [expected]
        server.reset()
        assert server.ask(prompt(LONG), cache_salt="a") == (expected, WHOLE)
        wait_until_stored(tmp_path / "ssd", WHOLE // BLOCK)
        os.kill(workers[0], signal.SIGKILL)  # vLLM ends with its worker; flexkv does not hold it up
        server.process.wait(60)
    with serve(tiny, transfer, *two, **settings) as server:
        assert server.ask(prompt(LONG), cache_salt="a") == (expected, WHOLE)
