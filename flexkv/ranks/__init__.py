"""Engines of several processes: the manager commands, each worker copies where its memory is.

`RanksBackend` (the device plug-in `ranks`) and `RankServer` on the manager's side - `RankAgent` in
each worker. A worker joins over a Unix socket, maps the arena and runs the copies it is sent.
"""

from flexkv.ranks.agent import RankAgent
from flexkv.ranks.backend import RanksBackend
from flexkv.ranks.server import RankServer

__all__ = ["RankAgent", "RankServer", "RanksBackend"]
