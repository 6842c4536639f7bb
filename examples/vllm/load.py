"""Many requests with shared prefixes, with and without flexkv: TTFT percentiles, tokens/s, hits.

    examples/vllm/run.sh load.py                 both sides in turn, with a random model
    examples/vllm/run.sh load.py MODEL --rate 2  another model; arrivals as a Poisson process
    examples/vllm/run.sh load.py --prefixes 0    nothing shared: what does storing cost?
    examples/vllm/run.sh load.py --calls         also: how long the scheduler waits for flexkv
    examples/vllm/run.sh load.py --url http://HOST:8000     a server that runs already, or several

Two servers are started, with flexkv and without; in every round each of them gets the same new
prompts, one server after the other, the order turning. So every round begins cold, and a noisy
minute hits both. vLLM's own prefix cache is on, as big as --device-tokens says. Options of vLLM's
server may follow after `--`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from harness import BLOCK, Server, prompts, random_model, show, transfer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flexkv.bench.report import machine, percentile, ratio_of_pairs

WITH, WITHOUT = "with flexkv", "without"


@dataclass(slots=True)
class Answer:
    """One request: when it was sent and answered (seconds of the round), and its tokens."""

    sent_s: float
    first_s: float
    last_s: float
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int


@dataclass(slots=True)
class Side:
    """One server and what it achieved: its answers round by round, and external hits in tokens."""

    name: str
    server: Server
    model: str
    rounds: list[list[Answer]]
    external_tokens: float = 0.0

    def throughputs(self) -> list[float]:
        """Tokens per second of each round, prompts and answers."""
        return [
            sum(answer.prompt_tokens + answer.answer_tokens for answer in answers)
            / (max(answer.last_s for answer in answers) - min(answer.sent_s for answer in answers))
            for answers in self.rounds
        ]

    def summary(self) -> dict[str, Any]:
        """All figures of this side."""
        answers = [answer for answers in self.rounds for answer in answers]
        waits = [(answer.first_s - answer.sent_s) * 1e3 for answer in answers]
        asked = sum(answer.prompt_tokens for answer in answers)
        return {
            "requests": len(answers),
            **{f"ttft_ms_p{p}": round(percentile(waits, p), 1) for p in (50, 90, 99)},
            "tokens_per_s": round(statistics.median(self.throughputs()), 1),
            "hit_share": round(sum(answer.cached_tokens for answer in answers) / asked, 4),
            "external_hit_share": round(self.external_tokens / asked, 4),
        }


async def ask(
    session: aiohttp.ClientSession, side: Side, tokens: list[int], count: int, start: float
) -> Answer:
    """Ask one prompt, hear the answer as it comes."""
    body = {"model": side.model, "prompt": tokens, "max_tokens": count, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    sent, first, usage = time.perf_counter(), 0.0, {}
    async with session.post(f"{side.server.url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            first = first or time.perf_counter()
            usage = json.loads(line[6:]).get("usage") or usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    last, made = time.perf_counter(), usage["completion_tokens"]
    return Answer(sent - start, first - start, last - start, usage["prompt_tokens"], cached, made)


async def arrivals(options: argparse.Namespace, dice: random.Random) -> AsyncIterator[int]:
    """Number the requests as they arrive: at random moments, or as fast as they are taken."""
    for number in range(options.requests):
        if options.rate:
            await asyncio.sleep(dice.expovariate(options.rate))
        yield number


async def play(
    session: aiohttp.ClientSession, side: Side, options: argparse.Namespace, turn: int, bar: Any
) -> None:
    """Let one side answer all requests of a round, then wait until it rests."""
    dice = random.Random(f"{options.seed}-{turn}")
    groups = options.prefixes or options.requests
    shared = options.shared if options.prefixes else 0
    own = options.own if options.prefixes else options.shared + options.own
    counts = [len(range(group, options.requests, groups)) for group in range(groups)]
    asked = [
        prompt
        for group, count in enumerate(counts)
        for prompt in prompts(shared, own, count, (options.seed, turn, group))
    ]
    dice.shuffle(asked)
    seats = asyncio.Semaphore(options.requests if options.rate else options.concurrency)
    start = time.perf_counter()
    answers = []

    async def one(tokens: list[int]) -> None:
        try:
            answers.append(await ask(session, side, tokens, options.answer, start))
        finally:
            seats.release()
        bar()

    before = await side.server.metric(session, "external_prefix_cache_hits_total")
    async with asyncio.TaskGroup() as group:
        async for number in arrivals(options, dice):
            await seats.acquire()
            group.create_task(one(asked[number]))
    await side.server.idle(session)
    side.external_tokens += await side.server.metric(session, "external_prefix_cache_hits_total")
    side.external_tokens -= before
    side.rounds.append(answers)


async def run(options: argparse.Namespace, servers: dict[str, Server]) -> list[Side]:
    """Warm all servers up, then play the rounds."""
    endless = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=endless, connector_owner=True) as session:
        sides = [
            Side(name, server, await server.wait(session), []) for name, server in servers.items()
        ]
        for side in sides:
            length = min(options.shared + options.own, 4096)  # a first long one takes longer
            for prompt in prompts(0, length, 2, side.name):
                await ask(session, side, prompt, options.answer, 0.0)
            await side.server.idle(session)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), transient=True) as progress:
            total = options.rounds * options.requests
            bars = [progress.add_task(side.name, total=total) for side in sides]
            for turn in range(options.rounds):
                shift = turn % len(sides)
                for side, bar in [*zip(sides, bars, strict=True)][shift:] + [
                    *zip(sides, bars, strict=True)
                ][:shift]:
                    await play(session, side, options, turn, lambda bar=bar: progress.advance(bar))
    return sides


def start(options: argparse.Namespace, directory: Path) -> dict[str, Server]:
    """Start both sides' servers, or take those that run."""
    if options.url:
        return {url: Server(url) for url in options.url}
    model = options.model or random_model(directory, options.layers, options.hidden)
    length = options.shared + options.own + options.answer
    tokens = options.device_tokens or (options.concurrency + 1) * length
    flags = ["--num-gpu-blocks-override", str(-(-tokens // BLOCK) + 1)]
    flags += ["--max-model-len", str(length + BLOCK)]
    if options.model is None:
        flags += ["--hf-overrides", json.dumps({"max_position_embeddings": length + BLOCK})]
    settings: dict[str, Any] = {"host_cache_bytes": options.host, "save": options.save}
    if options.ssd != "0":
        settings |= {"disk_cache_bytes": options.ssd, "disk_dirs": [str(directory / "ssd")]}
    timed = ("TimedConnector", "timed_connector") if options.calls else ()
    connector = transfer(settings, *timed)
    place = {"CALLS_FILE": str(directory / "calls.json")}
    flags += options.vllm
    servers = {}
    try:
        if options.sides != "without":
            servers[WITH] = Server.start(model, directory / "with.log", flags, connector, place)
        if options.sides != "with":
            servers[WITHOUT] = Server.start(model, directory / "without.log", flags)
    except BaseException:
        for server in servers.values():
            server.end()
        raise
    return servers


def report(options: argparse.Namespace, sides: list[Side], calls: dict[str, list[float]]) -> None:
    """Print the tables and the line of JSON."""
    figures = {side.name: side.summary() for side in sides}
    shape = f"{options.requests} requests x {options.rounds}, {options.prefixes} prefixes of "
    shape += f"{options.shared} tokens, {options.own} own, {options.answer} answered"
    names = ("TTFT p50", "p90", "p99", "tokens/s", "hit share", "of it external")
    rows = [[name, *map(_short, list(figure.values())[1:])] for name, figure in figures.items()]
    show(shape, ("", *(f"{name} ms" if name[-1].isdigit() else name for name in names)), rows)
    said: dict[str, Any] = {"machine": machine(), "sides": figures}
    if len(sides) == 2:
        first, second = (side.throughputs() for side in sides)
        medians = statistics.median(first) / statistics.median(second)
        pairs = ratio_of_pairs(first, second)
        said |= {"throughput_ratio": medians, "throughput_ratio_of_pairs": pairs}
        print(f"throughput, {sides[0].name} / {sides[1].name}: {medians:.3f} of the medians,")
        print(f"{pairs:.3f} median of {len(first)} pairs, each measured side by side")
    if calls:
        spread = {
            name: [len(times), *(round(percentile(times, p), 1) for p in (50, 90, 99, 100))]
            for name, times in sorted(calls.items())
        }
        columns = ("the scheduler's call", "calls", "p50 us", "p90 us", "p99 us", "most us")
        show("", columns, [[name, *map(_short, row)] for name, row in spread.items()])
        said["calls_us"] = spread
    said["options"] = {name: value for name, value in vars(options).items() if name != "model"}
    said["answers"] = [[asdict(a) for a in answers] for side in sides for answers in side.rounds]
    print(json.dumps(said, default=str))


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:,}"


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", nargs="?", type=Path, help="a model's directory; default: a random one")
    add("--url", action="append", help="measure a server that runs already; may be repeated")
    add("--requests", type=int, default=16, help="of each round (16)")
    add("--prefixes", type=int, default=4, help="shared parts; 0: nothing is shared (4)")
    add("--shared", type=int, default=4096, help="tokens of a shared part (4096)")
    add("--own", type=int, default=256, help="tokens of a request's own part (256)")
    add("--answer", type=int, default=16, help="tokens of an answer (16)")
    add("--concurrency", type=int, default=2, help="requests at once, unless --rate (2)")
    add("--rate", type=float, help="requests per second, at random moments")
    add("--rounds", type=int, default=1, help="each with new prompts (1)")
    add("--sides", choices=["both", "with", "without"], default="both")
    add("--seed", type=int, default=0)
    add("--device-tokens", type=int, help="tokens of the engine's KV memory (few prompts)")
    add("--host", default="4GiB", help="flexkv's host memory (4GiB)")
    add("--ssd", default="0", help="flexkv's SSD space (0: none)")
    add("--save", default="finish", help="what flexkv stores: finish, prompt, none")
    add("--layers", type=int, default=8, help="of the random model (8)")
    add("--hidden", type=int, default=1024, help="size of the random model (1024)")
    add("--dir", type=Path, help="where the model, logs and SSD blocks go")
    add("--calls", action="store_true", help="time the scheduler's calls of flexkv")
    given, vllm = sys.argv[1:], []
    if "--" in given:
        at = given.index("--")
        given, vllm = given[:at], given[at + 1 :]
    options = parser.parse_args(given)
    options.vllm = vllm
    if options.requests < 1 or options.rounds < 1 or options.concurrency < 1:
        parser.error("requests, rounds and concurrency must be at least 1")
    return options


def main() -> None:
    """Start, play, end, report."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server is left behind
    with tempfile.TemporaryDirectory(dir=options.dir, ignore_cleanup_errors=True) as place:
        directory = Path(place)
        servers = start(options, directory)
        try:
            sides = asyncio.run(run(options, servers))
        except BaseException:
            for log in directory.glob("*.log"):
                print(f"{log.name}:\n" + log.read_text(errors="replace")[-2000:])
            raise
        finally:
            for server in servers.values():
                server.end()
        calls = directory / "calls.json"
        report(options, sides, json.loads(calls.read_text()) if calls.exists() else {})


if __name__ == "__main__":
    main()
