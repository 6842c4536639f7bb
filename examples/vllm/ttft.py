"""Time to first token of one engine, four ways: cold, from its own prefix cache, from flexkv's host
memory, and - after the engine was restarted - from SSD.

    examples/vllm/run.sh ttft.py [MODEL] [--shared 4096] [--own 256] [--prompts 6] [--dir DIRECTORY]

"again" asks a known prompt, "new" its shared part with another own part, which has to be computed
whatever the cache holds. Without MODEL a random one of 8 layers is made. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parents[2] / "tests" / "vllm" / "models.py"


def make_engine(options: argparse.Namespace, save: str) -> Any:
    """Start vLLM with flexkv."""
    from vllm import LLM

    transfer = {
        "kv_connector": "FlexKVConnector",
        "kv_connector_module_path": "flexkv.integration.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "host_cache_bytes": "2GiB",
            "disk_cache_bytes": "4GiB",
            "disk_dirs": [str(options.dir / "ssd")],
            "save": save,
        },
    }
    return LLM(
        str(options.model),
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        kv_transfer_config=transfer,
    )


def ask(llm: Any, tokens: list[int], count: int = 1) -> tuple[float, int, list[int]]:
    """Seconds, cached prompt tokens and the answer."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    start = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    return seconds, output.num_cached_tokens, list(output.outputs[0].token_ids)


def rest(llm: Any) -> None:
    """Step until the saves of finished requests are over, too."""
    while llm.llm_engine.engine_core.engine_core.scheduler.has_requests():
        llm.llm_engine.step()


def empty(llm: Any) -> None:
    """Empty vLLM's own prefix cache."""
    rest(llm)
    assert llm.reset_prefix_cache()


def prompts(options: argparse.Namespace) -> list[list[list[int]]]:
    """Four prompts for each shared part, with different own parts."""
    made = []
    for seed in range(options.prompts):
        dice = random.Random(seed)
        shared = [dice.randrange(3, 1000) for _ in range(options.shared)]
        owns = [[dice.randrange(3, 1000) for _ in range(options.own)] for _ in range(4)]
        made.append([shared + own for own in owns])
    return made


def first_life(options: argparse.Namespace) -> dict[str, list[float]]:
    """Cold, vLLM's own cache and flexkv's host memory."""
    llm = make_engine(options, "finish")
    for _ in range(2):
        ask(llm, list(range(3, 600)), 4)
    ways = ("cold", "local again", "local new", "host again", "host new")
    times: dict[str, list[float]] = {way: [] for way in ways}
    for first, second, third, _ in prompts(options):
        for way, tokens in zip(ways, (first, first, second, first, third), strict=True):
            if way.startswith("host"):
                empty(llm)
            rest(llm)
            seconds, cached, _ = ask(llm, tokens)
            assert (cached >= options.shared) == (way != "cold"), (way, cached)
            times[way].append(seconds)
        empty(llm)
    return times


def second_life(options: argparse.Namespace) -> dict[str, list[float]]:
    """After a restart: from SSD. A prompt is in host memory once it was asked, so each counts for
    one way only."""
    llm = make_engine(options, "none")
    for _ in range(2):
        ask(llm, list(range(3, 600)), 4)
    times: dict[str, list[float]] = {"ssd again": [], "ssd new": []}
    for number, (first, _, _, fourth) in enumerate(prompts(options)):
        way, tokens = ("ssd new", fourth) if number % 2 else ("ssd again", first)
        seconds, cached, _ = ask(llm, tokens)
        assert cached >= options.shared, cached
        times[way].append(seconds)
    return times


def main() -> None:
    """Run both lives in processes of their own and print what they measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--shared", type=int, default=4096)
    parser.add_argument("--own", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--life", choices=["first", "second"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.life:
        times = first_life(options) if options.life == "first" else second_life(options)
        (options.dir / f"{options.life}.json").write_text(json.dumps(times))
        return
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        options.dir = Path(directory)
        if options.model is None:
            options.model = options.dir / "model"
            maker = [sys.executable, str(MODELS), str(options.model), "8", "1024", "4096"]
            subprocess.run(maker, check=True)
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        times = {}
        for life in ("first", "second"):
            again = [sys.executable, __file__, str(options.model), "--life", life]
            again += ["--shared", str(options.shared), "--own", str(options.own)]
            again += ["--prompts", str(options.prompts), "--dir", directory]
            subprocess.run(again, check=True, env=environment)
            times |= json.loads((options.dir / f"{life}.json").read_text())
    medians = {way: statistics.median(values) for way, values in times.items()}
    print(f"\n{options.shared} shared + {options.own} own tokens, {options.prompts} prompts")
    for way, seconds in medians.items():
        print(f"{way:>12}: {seconds * 1e3:8.1f} ms   {medians['cold'] / seconds:6.1f} x cold")
    print(json.dumps({"median_s": medians, "all_s": times}))


if __name__ == "__main__":
    main()
