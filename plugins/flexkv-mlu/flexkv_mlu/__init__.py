"""Cambricon MLUs for flexkv: `backend.MluBackend`, `harness.MluHarness`."""
