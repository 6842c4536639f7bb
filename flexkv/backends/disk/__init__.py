"""The disk tier: `DiskBackend`, and what reads its files without opening it (`flexkv disk
inspect|verify`).
"""

from flexkv.backends.disk.backend import DiskBackend
from flexkv.backends.disk.settings import DiskSettings

__all__ = ["DiskBackend", "DiskSettings"]
