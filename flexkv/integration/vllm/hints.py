"""Hints that come with vLLM's requests, in `kv_transfer_params["flexkv"]`: `read_hint` (checks what
a client sent; what cannot be used is logged and ignored) - `Hint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flexkv.telemetry import log

_RETAIN = ("priority", "ttl_s", "steps")


@dataclass(frozen=True, slots=True)
class Hint:
    """What a client wants of its prompt: `retain` holds arguments of `KVManager.retain`."""

    request: str
    retain: dict[str, Any]
    prefetch: bool = False


def read_hint(request: Any) -> Hint | None:
    """Return the hint of a request, None where there is none that can be used."""
    parameters = getattr(request, "kv_transfer_params", None)
    given = parameters.get("flexkv") if isinstance(parameters, Mapping) else None
    if given is None:
        return None
    if not isinstance(given, Mapping) or not set(given) <= {*_RETAIN, "prefetch"}:
        log.warning("vllm.hint_ignored", request=request.request_id, flexkv=repr(given)[:200])
        return None
    retain = {name: given[name] for name in _RETAIN if given.get(name) is not None}
    return Hint(request.request_id, retain, bool(given.get("prefetch")))
