"""Modes of the decode simulator: Question, run_baseline, run_orchestrated, compare, sweep.

A question is plain values, as a command line gives them; every mode answers with DecodeResults.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flexkv.errors import ConfigError
from flexkv.sim.compute import ComputeModel, shape
from flexkv.sim.decode.result import DecodeResult
from flexkv.sim.decode.run import simulate
from flexkv.sim.decode.settings import (
    CODECS,
    OVERLAPPED,
    PIPELINES,
    SERIAL,
    Pipeline,
    Placement,
    Settings,
    read_codecs,
)
from flexkv.sim.decode.workload import Workload, attention, prototype, sparse
from flexkv.sim.profiles import hardware

WORKLOADS = ("prototype", "sparse", "attention")
Heard = Callable[[str, int, int], None]  # what runs, step, of how many


def _quiet(what: str, step: int, steps: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Question:
    """What to simulate. `None` stands for what the workload suggests.

    `contexts` are tokens, one sequence each (a trace's input lengths); `bandwidth` are factors and
    `capacity_bytes` are bytes by tier.
    """

    workload: str = "prototype"
    contexts: tuple[int, ...] = (8192,) * 8
    steps: int | None = None
    batch: int | None = None
    model: str = "llama-3.1-8b"
    hardware: str | None = None
    pipeline: str = "overlapped"
    codec: str = "int8"
    predictor: str | None = None
    policy: str = "hot-warm-cold"
    placement: Placement = field(default_factory=Placement)
    bandwidth: Mapping[str, float] = field(default_factory=dict)
    capacity_bytes: Mapping[str, float] = field(default_factory=dict)
    waves: int = 8
    codecs: Path | None = None  # a file of measured figures

    def __post_init__(self) -> None:
        if self.workload not in WORKLOADS:
            raise ConfigError(f"no workload {self.workload!r}; known are {list(WORKLOADS)}")
        if self.pipeline not in PIPELINES:
            raise ConfigError(f"no pipeline {self.pipeline!r}; known are {sorted(PIPELINES)}")
        if not self.contexts:
            raise ConfigError("there is no context length to simulate; give one, or a trace")

    def machine(self) -> str:
        """Return the hardware's name: the prototype's for its workload, an H100 otherwise."""
        return self.hardware or ("prototype" if self.workload == "prototype" else "h100")

    def build(self) -> Workload:
        """Return the workload."""
        if self.workload == "prototype":
            return prototype(
                requests=len(self.contexts),
                steps=self.steps or 128,
                context_tokens=self.contexts[0],
            )
        if self.workload == "sparse":
            return sparse(self.contexts, steps=self.steps or 64, batch=self.batch or 1)
        machine = hardware(self.machine())
        if machine.flops_per_s <= 0:
            raise ConfigError(
                f"hardware {machine.name!r} does not say what it computes; real attention needs"
                " flops_per_s, as h100 has"
            )
        compute = ComputeModel(
            shape(self.model), machine.flops_per_s, machine.tiers["hbm"].read_bytes_per_s
        )
        return attention(self.contexts, compute, steps=self.steps or 16, batch=self.batch or 4)

    def settings(self, pipeline: Pipeline, *, orchestrated: bool, staging: bool) -> Settings:
        """Return the settings of one run of this question."""
        machine = hardware(self.machine())
        for tier, factor in self.bandwidth.items():
            machine = machine.scaled(tier, factor)
        # the published model prefetched with an oracle: its reproduction does, nothing else here
        as_published = pipeline is SERIAL and self.workload == "prototype"
        predictor = self.predictor or ("oracle" if as_published else "markov")
        return Settings(
            machine,
            pipeline,
            orchestrated,
            replace(self.placement, policy=self.policy),
            codec=self.codec,
            codecs=read_codecs(self.codecs)
            if self.codecs
            else CODECS["prototype" if machine.name == "prototype" else "accelerator"],
            predictor=predictor,
            capacity_bytes=self.capacity_bytes,
            waves=self.waves,
            staging=staging,
        )


def _run(
    question: Question, workload: Workload, what: str, settings: Settings, heard: Heard
) -> DecodeResult:
    return simulate(workload, settings, lambda step: heard(what, step + 1, workload.steps))


def run_baseline(
    question: Question, heard: Heard = _quiet, *, staging: bool = False
) -> DecodeResult:
    """Run raw blocks in HBM on demand; with `staging`, what was read stays on chip (lru)."""
    pipeline = PIPELINES[question.pipeline]
    settings = question.settings(pipeline, orchestrated=False, staging=staging)
    result = _run(question, question.build(), "baseline", settings, heard)
    result.mode = "baseline + staging" if staging else "baseline"
    return result


def run_orchestrated(question: Question, heard: Heard = _quiet) -> DecodeResult:
    """Run placement, codec, staging and prefetch."""
    settings = question.settings(PIPELINES[question.pipeline], orchestrated=True, staging=True)
    return _run(question, question.build(), "orchestrated", settings, heard)


def compare(question: Question, heard: Heard = _quiet) -> list[DecodeResult]:
    """Run baseline and orchestration with both pipelines, and the baseline that may stage, too.

    The last one is the fair opponent: the same staging buffers, no placement, codec or prefetch.
    """
    found = []
    for pipeline in (SERIAL, OVERLAPPED):
        here = replace(question, pipeline=pipeline.name)
        found.append(run_baseline(here, heard))
        if pipeline is OVERLAPPED:
            found.append(run_baseline(here, heard, staging=True))
        found.append(run_orchestrated(here, heard))
    return found


def questions(question: Question, axes: Mapping[str, Sequence[object]]) -> Iterator[Question]:
    """Yield the question with every combination of the values of `axes` (field names)."""
    for values in itertools.product(*axes.values()):
        yield replace(question, **dict(zip(axes, values, strict=True)))  # type: ignore[arg-type]


def sweep(
    question: Question, axes: Mapping[str, Sequence[object]], heard: Heard = _quiet
) -> list[tuple[Question, DecodeResult]]:
    """Run baseline and orchestration for every combination of `axes`."""
    if not axes:
        raise ConfigError(
            "a sweep needs something to vary: context lengths, bandwidths, codecs, capacities,"
            " policies or predictors"
        )
    found = []
    for one in questions(question, axes):
        found.append((one, run_baseline(one, heard)))
        found.append((one, run_orchestrated(one, heard)))
    return found
