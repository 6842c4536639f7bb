"""Workloads made from a seed: `generate` - `GENERATORS` (name -> the dataclass of its parameters).

`Chat`, `Agents`, `Rag`, `Uniform`: each is called with a number of requests and a seed and returns
a Trace. Same parameters, same seed: the same trace, on every machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flexkv.errors import InputError
from flexkv.traces.generators.agents import Agents
from flexkv.traces.generators.chat import Chat
from flexkv.traces.generators.rag import Rag
from flexkv.traces.generators.uniform import Uniform
from flexkv.traces.model import Trace

Generator = Chat | Agents | Rag | Uniform
GENERATORS: dict[str, type[Chat] | type[Agents] | type[Rag] | type[Uniform]] = {
    "chat": Chat,
    "agents": Agents,
    "rag": Rag,
    "uniform": Uniform,
}


def parameters(kind: str) -> dict[str, tuple[Any, str]]:
    """Return what can be set: name -> (default, what it means).

    Raises:
        InputError: there is no such generator.
    """
    if kind not in GENERATORS:
        raise InputError(f"unknown generator {kind!r}; known: {', '.join(GENERATORS)}")
    fields = dataclasses.fields(GENERATORS[kind])
    return {field.name: (field.default, field.metadata["help"]) for field in fields}


def generate(
    kind: str, requests: int, *, seed: int = 0, settings: Mapping[str, Any] | None = None
) -> Trace:
    """Make a trace of so many requests.

    Args:
        kind: one of GENERATORS.
        settings: parameters of the generator (`parameters` lists them), numbers or text.

    Raises:
        InputError: no such generator or parameter, or a value that cannot be.
    """
    known, chosen = parameters(kind), {}
    for name, value in (settings or {}).items():
        if name not in known:
            raise InputError(f"{kind} has no parameter {name!r}; it has {', '.join(known)}")
        wanted = type(known[name][0])
        try:
            chosen[name] = wanted(value)
        except (TypeError, ValueError) as error:
            raise InputError(f"{name} is of type {wanted.__name__}, got {value!r}") from error
    if requests < 1:
        raise InputError(f"a trace has at least 1 request, got {requests}")
    return GENERATORS[kind](**chosen)(requests, seed)
