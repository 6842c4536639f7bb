"""What a model says behind a prefix of which only a part stayed (see flexkv.cold): `measure`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flexkv.bench.report import Result
from flexkv.cold import Selection, SinkWindow, TopBlocks
from flexkv.errors import ConfigError

_SINK_TOKENS, _WINDOW_TOKENS = 16, 64


def measure(sample: Any, shares: Sequence[float], facts: dict[str, Any]) -> list[Result]:
    """Compare the whole prefix of a `Sample` with what `SinkWindow` and `TopBlocks` leave of it.

    `sink_window_SHARE_error` and `top_blocks_SHARE_error` are relative errors of attention's
    outputs; parameters have the ratio in bytes, next tokens that stay the same and what the text's
    loss rises by. Blocks are scored by what the prefix's last tokens look at: nothing of the text
    behind it is known.
    """
    size = sample.tokens_per_block
    count = sample.prefix_tokens // size
    for share in shares:
        if not 0 < share <= 1:
            raise ConfigError(f"shares must be above 0 and at most 1, got {share}")
    scores = sample.attention(_WINDOW_TOKENS)
    results = []
    for share in shares:
        window = math.ceil(share * count) * size - _SINK_TOKENS
        ways: dict[str, Selection] = {
            "sink_window": SinkWindow(_SINK_TOKENS, max(0, window)),
            "top_blocks": TopBlocks(scores, share, _SINK_TOKENS, _WINDOW_TOKENS),
        }
        for name, way in ways.items():
            blocks = way.select(count, size)
            found = sample.thinned(blocks)
            params = facts | {key: float(f"{value:.5g}") for key, value in found.items()}
            params |= {"blocks": len(blocks), "of_blocks": count, "ratio": count / len(blocks)}
            params["continuation_tokens"] = sample.continuation_tokens
            value = found["attention_relative_rms"]
            label = f"{name}_{share:g}_error"
            results.append(Result(label, value, "of rms", samples=1, params=params))
    return results
