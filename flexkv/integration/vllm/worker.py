"""The connector in a vLLM worker: registers the KV memory, opens gates, hands news back.

`register` - `begin` (every step) - `await_layer` - `ends`, `failed_blocks` (what the scheduler is
to hear) - `close`. Copies run in the RankAgent's thread.
"""

from __future__ import annotations

from typing import Any

from flexkv.errors import LayoutError
from flexkv.integration.vllm.geometry import declared_axes, describe
from flexkv.integration.vllm.messages import StepNews
from flexkv.integration.vllm.options import Options
from flexkv.ranks import RankAgent
from flexkv.telemetry import log


class WorkerSide:
    """Serves one worker."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, version: str) -> None:
        self._options = Options.read(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._path = self._options.socket_path(vllm_config)
        self._geometry = describe(vllm_config, kv_cache_config, version)
        self._version = version
        self._agent: RankAgent | None = None
        self._layers: dict[str, int] = {}
        self._awaited: list[tuple[int, list[int]]] = []
        self._failed: set[int] = set()

    def register(self, kv_caches: dict[str, Any], stage: int, tensor_rank: int) -> None:
        """Describe the memory of this worker, of a pipeline stage, and begin to join.

        Raises:
            LayoutError: its layout is not declared for this vLLM, or does not match the model.
            ConfigError, PluginError: the device plug-in that was set does not exist.
        """
        if not kv_caches:
            raise LayoutError("vLLM registered no KV tensors")
        tensor = next(iter(kv_caches.values()))
        on_cpu = tensor.device.type == "cpu"
        axes = self._options.axes or declared_axes(self._version, tensor.dim(), on_cpu=on_cpu)
        device, settings = self._options.worker_device(tensor.device.type)
        self.close()
        rank = self._geometry.rank(stage, tensor_rank)
        self._agent = RankAgent(
            self._path,
            rank=rank,
            ranks=self._geometry.ranks,
            kv_caches=self._geometry.tensors(kv_caches),
            spec=self._geometry.share(rank),
            axes=axes,
            device=device,
            settings=settings,
        )
        self._agent.start()
        self._layers = {name: number for number, name in enumerate(kv_caches)}
        log.info("vllm.registered", rank=rank, layers=len(kv_caches), axes=axes, device=device)

    def begin(self, news: StepNews) -> None:
        """The engine begins a step: copies that waited for it may run."""
        withdrawn, news.withdrawn = news.withdrawn, []
        if self._agent is not None:
            self._agent.begin_step(news.step, withdrawn)

    def expect(self, news: StepNews) -> None:
        """Remember the loads that this step has to wait for."""
        self._awaited, news.awaited = [*self._awaited, *news.awaited], []

    def await_layer(self, name: str) -> None:
        """Wait until one layer of the loads of this step is here; an unknown one stands for all."""
        if self._awaited:
            self._await(self._layers.get(name))

    def _await(self, layer: int | None) -> None:
        """Wait for a layer of the loads (None: for all); remember what did not arrive as failed.

        What attention has read of a load that fails later does no harm: vLLM looks at its failed
        blocks after the step, and drops what the step computed from them.
        """
        timeout_s, agent = self._options.engine_wait_ms / 1e3, self._agent
        coming = []
        for number, blocks in self._awaited:
            failed = None
            if agent is not None:
                failed = agent.wait_loaded(number, len(blocks), layer, timeout_s)
            if layer is not None and failed == ():
                coming.append((number, blocks))
            else:
                self._failed.update(blocks if failed is None else failed)
        self._awaited = coming

    def ends(self, news: StepNews) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose saves and loads are over, as vLLM wants them."""
        self._await(None)
        return news.sent or None, news.received or None

    def failed_blocks(self, news: StepNews) -> set[int]:
        """Return the device blocks that failed to load, once."""
        self._await(None)
        failed, self._failed = self._failed | news.failed, set()
        return failed

    def close(self) -> None:
        """Part from the manager. Twice is fine."""
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()
