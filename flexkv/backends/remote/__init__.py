"""Stores on other machines, addressed by key; each module is one of them, the rest is shared."""
