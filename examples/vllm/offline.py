"""The smallest use: a prompt, its answer, the engine's own cache emptied, the same answer again.

examples/vllm/run.sh offline.py MODEL
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    llm = LLM(
        sys.argv[1],
        enforce_eager=True,
        dtype="float32",
        kv_transfer_config={
            "kv_connector": "FlexKVConnector",
            "kv_connector_module_path": "flexkv.integration.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"host_cache_bytes": "1GiB"},
        },
    )
    prompt = "Long documents are read once. " * 100
    sampling = SamplingParams(temperature=0, max_tokens=16)
    (first,) = llm.generate([prompt], sampling)
    while not llm.reset_prefix_cache():  # the save still reads the blocks
        llm.generate(["."], SamplingParams(max_tokens=1))
    (second,) = llm.generate([prompt], sampling)
    print(f"{second.num_cached_tokens} tokens came from flexkv")
    assert list(first.outputs[0].token_ids) == list(second.outputs[0].token_ids)
