"""Time to first token of one engine, prompt by prompt: cold, from its own prefix cache, from
flexkv's host memory, and - after the engine was restarted - from SSD.

    examples/vllm/run.sh ttft.py [MODEL] [--shared 4096] [--own 256] [--prompts 6] [--dir DIRECTORY]

"again" asks a known prompt, "new" its shared part with another own part, which has to be computed
whatever the cache holds. Before every question all that went before is over, up to the last byte
on SSD. Without MODEL a random one of 8 layers is made. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from harness import BLOCK, prompts, random_model, show, transfer

from flexkv.bench.report import machine

AGAIN = 3  # how often a prompt is asked again each way


class Engine:
    """vLLM with flexkv in this process."""

    def __init__(self, options: argparse.Namespace, save: str) -> None:
        from vllm import LLM

        settings = {
            "host_cache_bytes": "2GiB",
            "disk_cache_bytes": "4GiB",
            "disk_dirs": [str(options.dir / "ssd")],
            "save": save,
        }
        self._llm = LLM(
            str(options.model),
            enforce_eager=True,
            dtype="float32",
            block_size=BLOCK,
            max_model_len=8192,
            max_num_batched_tokens=8192,
            kv_transfer_config=transfer(settings),
        )
        for _ in range(2):  # a first long prompt takes longer
            self.ask(prompts(0, options.shared, 1, "warm up")[0])

    def ask(self, tokens: list[int]) -> tuple[float, int]:
        """Seconds to the first token, and prompt tokens that were not computed."""
        from vllm import SamplingParams

        self.rest()
        sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        start = time.perf_counter()
        (output,) = self._llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        return time.perf_counter() - start, output.num_cached_tokens

    def rest(self) -> None:
        """Wait until nothing is under way: neither saves nor what goes on to SSD."""
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        while scheduler.has_requests():
            self._llm.llm_engine.step()
        scheduler.connector.scheduler.kv.flush()

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        self.rest()
        assert self._llm.reset_prefix_cache()


def first_life(options: argparse.Namespace, times: dict[str, list[float]]) -> None:
    """Cold, vLLM's own cache and flexkv's host memory."""
    engine = Engine(options, "finish")

    def measure(way: str, tokens: list[int]) -> None:
        seconds, cached = engine.ask(tokens)
        assert (cached >= options.shared) == (way != "cold"), (way, cached)
        times[way].append(seconds)

    for number in range(options.prompts):
        first, second, third, _ = prompts(options.shared, options.own, 4, number)
        measure("cold", first)
        for _ in range(AGAIN):
            measure("local again", first)
        measure("local new", second)
        for _ in range(AGAIN):
            engine.forget()
            measure("host again", first)
        engine.forget()
        measure("host new", third)
        engine.forget()


def second_life(options: argparse.Namespace, times: dict[str, list[float]]) -> None:
    """After a restart: from SSD. A prompt is in host memory once it was asked, so each counts for
    one way only."""
    engine = Engine(options, "none")
    for number in range(options.prompts):
        first, _, _, fourth = prompts(options.shared, options.own, 4, number)
        way, tokens = ("ssd new", fourth) if number % 2 else ("ssd again", first)
        seconds, cached = engine.ask(tokens)
        assert cached >= options.shared, cached
        times[way].append(seconds)


def report(options: argparse.Namespace, times: dict[str, list[float]]) -> None:
    """Print the table and the line of JSON."""
    medians = {way: statistics.median(values) for way, values in times.items()}
    rows = []
    for way, seconds in medians.items():
        local = medians[f"local {way.split()[-1]}"] if way != "cold" else 0
        against = f"{seconds / local:.2f} x" if local else ""
        faster = f"{medians['cold'] / seconds:.1f} x"
        rows.append([way, f"{seconds * 1e3:,.1f}", str(len(times[way])), faster, against])
    title = f"{options.shared} shared + {options.own} own tokens, {options.prompts} prompts"
    columns = ("time to first token", "median ms", "asked", "faster than cold", "of a local hit")
    show(title, columns, rows)
    print(json.dumps({"machine": machine(), "median_s": medians, "all_s": times}))


def main() -> None:
    """Run both lives in processes of their own and print what they measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--shared", type=int, default=4096)
    parser.add_argument("--own", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=6, help="at least 2")
    parser.add_argument("--layers", type=int, default=8, help="of the random model")
    parser.add_argument("--hidden", type=int, default=1024, help="size of the random model")
    parser.add_argument("--dir", type=Path, help="where the model and the SSD blocks go")
    parser.add_argument("--life", choices=["first", "second"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.life:
        times: dict[str, list[float]] = defaultdict(list)
        (first_life if options.life == "first" else second_life)(options, times)
        (options.dir / f"{options.life}.json").write_text(json.dumps(times))
        return
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        options.dir = Path(directory)
        options.model = options.model or random_model(options.dir, options.layers, options.hidden)
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        times = {}
        for life in ("first", "second"):
            again = [sys.executable, __file__, str(options.model), "--life", life]
            again += ["--shared", str(options.shared), "--own", str(options.own)]
            again += ["--prompts", str(options.prompts), "--dir", directory]
            subprocess.run(again, check=True, env=environment)
            times |= json.loads((options.dir / f"{life}.json").read_text())
    report(options, times)


if __name__ == "__main__":
    main()
