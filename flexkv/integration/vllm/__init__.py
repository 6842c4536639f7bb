"""vLLM: `connector` is loaded by kv_connector_module_path, `vllm_v1_adapter` by vLLM's built-in
FlexKVConnectorV1. See docs/vllm.md.
"""
