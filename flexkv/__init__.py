"""flexkv: a KV-cache manager for LLM serving. Public names only."""
