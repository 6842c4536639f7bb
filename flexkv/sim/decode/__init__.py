"""Decode steps on a virtual clock: where KV blocks lie, what moves, and what the step waits for."""
