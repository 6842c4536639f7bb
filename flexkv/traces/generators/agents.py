"""Agents that use tools and call other agents: `Agents`."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from flexkv.traces.chaining import Prompt
from flexkv.traces.draws import Draws, zipf
from flexkv.traces.generators.parts import ANSWER_TOKENS_PER_S, Writer, checked, parameter
from flexkv.traces.model import Trace

_POPULARITY = 0.8  # of kinds of agents
_MAX_DEPTH = 3  # an agent called by one that was called


@dataclass(slots=True)
class _Agent:
    name: str
    prompt: Prompt
    steps: int
    depth: int
    caller: _Agent | None = None
    children: int = 0


@dataclass(frozen=True, slots=True)
class Agents:
    """Tasks that begin as a Poisson process; an agent answers, calls a tool, reads its result, and
    so on.

    All agents begin with the same rules, those of one kind go on with the same tools. A step may
    call another agent instead of a tool: that one begins with rules, tools of its own kind and its
    task, and its caller goes on when it is done.
    """

    tokens_per_block: int = parameter(16, "tokens of one block")
    tasks_per_s: float = parameter(0.1, "tasks that begin in a second")
    kinds: int = parameter(6, "kinds of agents, of Zipf popularity")
    steps: float = parameter(12.0, "steps of an agent, on average")
    delegates_share: float = parameter(0.1, "share of the steps that call another agent")
    tool_s: float = parameter(5.0, "seconds that a tool takes, on average")
    rules_tokens: int = parameter(2000, "tokens that all agents begin with")
    tools_tokens: int = parameter(4000, "median tokens of the tools of a kind")
    task_tokens: int = parameter(300, "median tokens of a task")
    result_tokens: int = parameter(800, "median tokens of the result of a tool")
    answer_tokens: int = parameter(150, "median tokens of an answer")

    def __post_init__(self) -> None:
        checked(self)

    def __call__(self, requests: int, seed: int) -> Trace:
        """Make so many requests."""
        return _Run(self, seed).run(requests)


class _Run:
    """One trace in the making."""

    def __init__(self, shape: Agents, seed: int) -> None:
        self._shape, self._seed, self._draws = shape, seed, Draws(seed)
        self._writer = Writer("agents", shape.tokens_per_block)
        self._popularity = zipf(shape.kinds, _POPULARITY)
        self._tools = [self._draws.length(shape.tools_tokens) for _ in self._popularity]
        self._waiting: list[tuple[float, int, _Agent]] = []  # (when, tie, who)
        self._pushed = 0

    def run(self, requests: int) -> Trace:
        """Let agents work until they have made so many requests."""
        draws, per_s = self._draws, self._shape.tasks_per_s
        begins_s, tasks = draws.exponential(1 / per_s), 0
        while len(self._writer) < requests:
            if not self._waiting or begins_s <= self._waiting[0][0]:
                self._wait(begins_s, self._agent(f"task-{tasks}", None))
                begins_s += draws.exponential(1 / per_s)
                tasks += 1
                continue
            time_s, _, agent = heapq.heappop(self._waiting)
            self._step(time_s, agent)
        return self._writer.trace(self._seed)

    def _agent(self, name: str, caller: _Agent | None) -> _Agent:
        draws, shape = self._draws, self._shape
        kind, prompt = draws.pick(self._popularity), self._writer.prompt()
        prompt.add("rules", shape.rules_tokens)
        prompt.add(("tools", kind), self._tools[kind])
        prompt.add(("task", name), draws.length(shape.task_tokens))
        steps = max(1, round(draws.exponential(shape.steps)))
        return _Agent(name, prompt, steps, caller.depth + 1 if caller else 1, caller)

    def _wait(self, time_s: float, agent: _Agent) -> None:
        heapq.heappush(self._waiting, (time_s, self._pushed, agent))
        self._pushed += 1

    def _step(self, time_s: float, agent: _Agent) -> None:
        draws, shape = self._draws, self._shape
        answer = draws.length(shape.answer_tokens)
        self._writer.request(time_s, agent.name, agent.prompt, answer)
        agent.prompt.add(("answer", len(self._writer)), answer)
        done_s = time_s + answer / ANSWER_TOKENS_PER_S
        agent.steps -= 1
        if agent.steps == 0:
            if agent.caller is not None:  # it reads what was found out
                agent.caller.prompt.add(("report", agent.name), answer)
                self._wait(done_s, agent.caller)
        elif agent.depth < _MAX_DEPTH and draws.chance(shape.delegates_share):
            agent.children += 1
            self._wait(done_s, self._agent(f"{agent.name}/{agent.children}", agent))
        else:
            tokens = draws.length(shape.result_tokens)
            agent.prompt.add(("result", len(self._writer)), tokens)
            self._wait(done_s + draws.exponential(shape.tool_s), agent)
