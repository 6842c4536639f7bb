"""Worlds: whole managers on simulated hardware in virtual time, made up and replayed by a seed."""
