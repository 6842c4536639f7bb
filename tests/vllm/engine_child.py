"""A vLLM engine in a process of its own, told what to do in JSON lines: see `engines.Engine`.

The engine core, its scheduler and its worker run in this process, so that its insides can be seen.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


class Child:
    """One engine and the verbs that the tests use."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**options)

    @property
    def inside(self) -> bool:
        return os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def flexkv(self) -> Any:
        """The SchedulerSide of the connector, however it was loaded."""
        connector = self.scheduler.connector
        return getattr(connector, "_flexkv_connector", connector).scheduler.side

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return list(self.llm.get_tokenizer().encode(text))

    def groups(self) -> int:
        """KV cache groups of the engine."""
        return len(self.scheduler.kv_cache_config.kv_cache_groups)

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int,
        salts: list[str | None] | None = None,
        hint: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        from vllm import SamplingParams

        inputs = []
        for i, prompt in enumerate(prompts):
            entry: dict[str, Any] = {"prompt_token_ids": prompt}
            if salts and salts[i] is not None:
                entry["cache_salt"] = salts[i]
            inputs.append(entry)
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        if hint is not None:
            sampling.extra_args = {"kv_transfer_params": {"flexkv": hint}}
        outputs = self.llm.generate(inputs, sampling, use_tqdm=False)
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
        }

    def clearest(self, prompts: list[list[int]], tokens: int) -> list[int]:
        """Numbers of the prompts whose greedy answers leave rounding nothing to decide."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        clear = []
        for number, output in enumerate(self.llm.generate(inputs, sampling, use_tqdm=False)):
            ranked = [
                sorted((entry.logprob for entry in choice.values()), reverse=True)
                for choice in output.outputs[0].logprobs
            ]
            if min(first - second for first, second, *_ in ranked) > 1e-4:
                clear.append(number)
        return clear

    def settle(self) -> bool:
        """Step until nothing is under way and every block is free."""
        if not self.inside:
            return True
        for _ in range(5000):
            if not self.scheduler.has_requests():
                return True
            self.llm.llm_engine.step()
        return False

    def reset_local(self) -> bool:
        self.settle()
        return bool(self.llm.reset_prefix_cache())

    def reset_all(self) -> bool:
        self.settle()
        return bool(self.llm.reset_prefix_cache(reset_connector=True))

    def usage(self) -> dict[str, Any]:
        self.flexkv.kv.flush()
        return dict(self.flexkv.kv.usage())

    def hints(self) -> int:
        """How many hints hold."""
        return int(self.flexkv.kv.manager.telemetry.value("hints"))

    def counters(self) -> dict[str, float]:
        """The manager's counters, by name and labels."""
        telemetry = self.flexkv.kv.manager.telemetry
        return {str(name): value for name, value in telemetry.snapshot().items()}

    def overwrite_host(self) -> None:
        """Put other bytes in the place of every block in host memory."""

        def overwrite() -> None:
            arena = self.flexkv.kv.manager._stack.arena
            for slot in range(arena.slots):
                arena.view(slot)[:] = 0

        self.flexkv.kv.call(overwrite)

    def break_manager(self) -> None:
        """Let the manager crash."""
        self.flexkv.kv.call(self.flexkv.kv.manager._host._break, RuntimeError("injected"))

    def fail_disk_reads(self, share: float) -> None:
        """Let a share of the blocks that are read from disk fail from now on."""
        import random

        import numpy as np

        from flexkv.testing.faults import Fault, inject

        dice = random.Random(1)

        class Sometimes(Fault):
            def pick(self, count: int) -> Any:
                return np.array([i for i in range(count) if dice.random() < share], np.intp)

        def inject_faults() -> None:
            stack = self.flexkv.kv.manager._stack
            inject(stack.engine.stores["disk"], stack.arena).active += [
                Sometimes("read", "EIO"),
                Sometimes("read", "flip"),
            ]

        self.flexkv.kv.call(inject_faults)

    def resident(self, sequences: list[list[int]], salts: list[str | None]) -> dict[str, Any]:
        """What the manager can read of these sequences, by tier, under the names that vLLM
        publishes; and how many blocks it can read in all.
        """
        import numpy as np
        from vllm.v1.core import kv_cache_utils

        from flexkv.model import READY

        size, manager = self.flexkv._size, self.flexkv.kv.manager

        def look() -> dict[str, Any]:
            index, keyring = manager._stack.index, manager._stack.keyring
            found: dict[str, set[Any]] = {name: set() for name in index.tiers}
            for tokens, salt in zip(sequences, salts, strict=True):
                root = keyring.root(() if salt is None else (f"salt={salt}",))
                blocks = index.find(keyring.chain(np.array(tokens), root))
                names = self._hashes(tokens[: len(blocks) * size], salt)
                for tier, name in enumerate(index.tiers):
                    ready = index.states(tier, blocks) == READY
                    found[name] |= {names[i] for i in np.flatnonzero(ready)}
            total = {name: len(index.readable(i)) for i, name in enumerate(index.tiers)}
            published = kv_cache_utils.maybe_convert_block_hash
            hashes = {tier: [published(name) for name in names] for tier, names in found.items()}
            return {"hashes": hashes, "total": total}

        answer: dict[str, Any] = self.flexkv.kv.call(look)
        return answer

    def _hashes(self, tokens: list[int], salt: str | None) -> list[Any]:
        """vLLM's own hashes of the blocks of a sequence."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        core = self.llm.llm_engine.engine_core.engine_core
        return list(
            Request(
                request_id="hashes",
                prompt_token_ids=tokens,
                sampling_params=SamplingParams(max_tokens=1),
                pooling_params=None,
                cache_salt=salt,
                block_hasher=core.request_block_hasher,
            ).block_hashes
        )

    def listens(self) -> bool:
        """Whether the manager records events for anybody."""
        return bool(self.flexkv.kv.call(lambda: self.flexkv.kv.manager._stack.events.listened_to))

    def damage_reads(self, times: int) -> None:
        """Let one bit of each of the next blocks from disk arrive wrong."""
        from flexkv.testing.faults import inject

        def damage() -> None:
            stack = self.flexkv.kv.manager._stack
            faults = inject(stack.engine.stores["disk"], stack.arena)
            faults.add("read", "flip", times=times)

        self.flexkv.kv.call(damage)

    def fail_loads(self, share: float) -> None:
        """Let a share of the copies to the device fail from now on, the same ones every time."""
        import random

        from flexkv.errors import TransferError

        manager = self.flexkv.kv.manager
        device = self.flexkv.kv.call(lambda: manager._stack.device)
        copy, dice = type(device).copy, random.Random(1)

        async def maybe(batch: Any) -> None:
            if batch.to_device and dice.random() < share:
                raise TransferError("injected")
            await copy(device, batch)

        device.copy = maybe

    @property
    def device(self) -> Any:
        """The simulated device between the worker's tensors and the host."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker._agent.backend.device

    def inject(self, fault: str, on: str, **how: Any) -> None:
        """Have the device's work go wrong, see `flexkv_simulated.Device.inject`."""
        self.device.inject(fault, on, **how)

    def heal(self) -> bool:
        """Take all faults back; whether the device had lost its context."""
        lost = bool(self.device.error)
        self.device.clear_faults()
        self.device.reset()
        return lost

    def device_work(self) -> dict[str, Any]:
        """Bytes that the device moved, by their source; how often a copy overtook another."""
        import numpy as np

        done = self.device.history()
        done = done[np.argsort(done["submitted_ns"], kind="stable")]
        answer: dict[str, Any] = {"overtaken": 0}
        for kind, source in enumerate(("host", "device")):
            copies = done[done["kind"] == kind]
            ends = copies["finish_ns"].astype(np.int64)
            answer["overtaken"] += int((np.diff(ends) < 0).sum())
            answer[source] = int(copies["size_bytes"].sum())
        return answer

    def slow_saves(self, pause_s: float) -> None:
        """Have every copy out of the device's memory begin late; count what saves lose."""
        import anyio

        from flexkv.backends.cpu import CpuBackend
        from flexkv.ranks.gates import Gate

        copy, begin = CpuBackend.copy, Gate.begin
        self.lost = 0

        async def late(backend: Any, batch: Any) -> None:
            if not batch.to_device:
                await anyio.sleep(pause_s)
            await copy(backend, batch)

        def count(gate: Any, step: int, withdrawn: Any = ()) -> None:
            self.lost += len(withdrawn)
            begin(gate, step, withdrawn)

        CpuBackend.copy, Gate.begin = late, count

    def lost_blocks(self) -> int:
        """How many blocks of saves under way were taken from preempted requests."""
        return self.lost

    def abort_after(self, prompt: list[int], steps: int) -> int:
        """Begin to answer a prompt and abort it; how many of its tokens were computed."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        engine.add_request("aborted", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=8))
        for _ in range(steps):
            engine.step()
        (request,) = self.scheduler.running
        computed = int(request.num_computed_tokens)
        engine.abort_request(["aborted"])
        self.settle()
        return computed

    def hang_manager(self, before_load: bool) -> None:
        """Have the manager's loop hang from now on, or from the next load on."""
        import threading

        self.hung = threading.Event()
        side = self.flexkv
        if not before_load:
            side.kv.post(self.hung.wait)
            return
        allocated = side.allocated

        def hang(request: Any, blocks: Any, loading: int) -> None:
            if loading and not self.hung.is_set():
                side.kv.post(self.hung.wait)
            allocated(request, blocks, loading)

        side.allocated = hang

    def release_manager(self) -> None:
        """Let it go on."""
        self.hung.set()

    def hold_layers(self) -> None:
        """Hold the later layers of a load back until the first one has been waited for."""
        import threading

        import anyio.to_thread

        from flexkv.backends.cpu import CpuBackend
        from flexkv.integration.vllm.worker import WorkerSide

        copy, wait = CpuBackend.copy, WorkerSide.await_layer
        first = threading.Event()
        self.held = 0

        async def hold(backend: Any, batch: Any) -> None:
            if batch.to_device and batch.layers is not None and batch.layers[0] > 0:
                await anyio.to_thread.run_sync(first.wait)
                self.held += 1
            await copy(backend, batch)

        def await_layer(worker: Any, name: str) -> None:
            loading = bool(worker._awaited)
            wait(worker, name)
            if loading:
                first.set()

        CpuBackend.copy, WorkerSide.await_layer = hold, await_layer

    def held_parts(self) -> int:
        """How many copies of later layers waited for the first one."""
        return self.held

    def abort_while_loading(self, prompt: list[int]) -> None:
        """Ask, and abort while the first step runs: before vLLM hears how its load went."""
        from vllm import SamplingParams

        from flexkv.integration.vllm.worker import WorkerSide

        engine, hear = self.llm.llm_engine, WorkerSide.failed_blocks
        core = engine.engine_core.engine_core
        engine.add_request("aborted", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=8))

        def abort(worker: Any, news: Any) -> set[int]:
            core.aborts_queue.put_nowait([request.request_id for request in self.scheduler.running])
            return hear(worker, news)

        WorkerSide.failed_blocks = abort
        engine.step()
        WorkerSide.failed_blocks = hear
        engine.abort_request(["aborted"])
        self.settle()

    def same_step(self, first: list[int], second: list[int], tokens: int) -> dict[str, Any]:
        """Load a prompt that fails, and one step later ask what begins alike."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        engine.add_request("a", {"prompt_token_ids": first}, sampling)
        engine.add_request("b", {"prompt_token_ids": second}, sampling)
        outputs = {}
        engine.step()
        engine.add_request("c", {"prompt_token_ids": second}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id] = list(output.outputs[0].token_ids)
        return outputs

    def churn(
        self, prompts: list[list[int]], tokens: int, aborted: list[int], seed: int
    ) -> dict[str, Any]:
        """Run requests together, abort some at random steps; outputs of those that finished."""
        import random

        from vllm import SamplingParams

        dice, engine = random.Random(seed), self.llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            engine.add_request(f"r{seed}-{number}", {"prompt_token_ids": prompt}, sampling)
        left = {number: dice.randrange(1, 60) for number in aborted}
        finished: dict[str, list[int]] = {}
        step = 0
        while engine.has_unfinished_requests():
            step += 1
            for number in [number for number, at in left.items() if at == step]:
                engine.abort_request([f"r{seed}-{number}"])
                del left[number]
            for output in engine.step():
                if output.finished:
                    number = output.request_id.split("-")[1]
                    finished[number] = list(output.outputs[0].token_ids)
        return {"finished": finished, "steps": step}

    def metrics(self) -> dict[str, float]:
        """vLLM's own counters."""
        return {
            metric.name: metric.value
            for metric in self.llm.get_metrics()
            if hasattr(metric, "value")
        }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed goes to standard error
    child = Child(json.loads(sys.stdin.readline()))
    answers.write('{"ok": "ready"}\n')
    for line in sys.stdin:
        call = json.loads(line)
        try:
            answer = {"ok": getattr(child, call["verb"])(**call["with"])}
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = {"error": repr(error)}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
