"""Benchmarks of `flexkv bench X`; each module has `run(progress, **options) -> list[Result]`."""
