"""Errors: one family, named for the state that caused them.

`FlexKVError` is the root. Messages say what happened, which value, and what to try. A failed read
is never an
error: it is a miss (see `flexkv.transfer.GetResult`).
"""

from __future__ import annotations


class FlexKVError(Exception):
    """Root of everything flexkv raises on purpose."""


class ConfigError(FlexKVError, ValueError):
    """A setting is unknown, malformed or contradicts another."""


class InputError(FlexKVError, ValueError):
    """An argument of a call (tokens, slot mapping, namespace, time-out) is not usable."""


class LayoutError(FlexKVError, ValueError):
    """Device tensors do not match the declared KVSpec, or their layout is ambiguous."""


class TraceError(FlexKVError, ValueError):
    """A trace cannot be read, or has what its format does not allow."""


class PluginError(FlexKVError):
    """A backend, policy or codec is unknown, duplicated, incompatible or fails to load."""


class CapacityError(FlexKVError):
    """A tier, table or queue cannot take the request now; nothing of it was done."""


class StorageError(FlexKVError):
    """A storage tier cannot be opened, or lost data that a caller was promised."""


class FormatError(StorageError):
    """A directory holds a foreign, older or damaged cache, or one of another identity."""


class OwnershipError(StorageError):
    """Another live process owns the directory."""


class TransferError(FlexKVError):
    """A transfer broke a promise (a put whose bytes did not arrive)."""


class StalledError(FlexKVError, TimeoutError):
    """Work that was waited for is not over in time; it is still under way."""


class ClosedError(FlexKVError):
    """The manager is not open: not entered yet, or closed already."""


class BrokenManagerError(FlexKVError):
    """The manager's own machinery crashed; the cause is chained, every later call raises this."""


class SimulationError(FlexKVError):
    """A simulation was asked for something impossible, or waits for what will never happen."""


class ConservationError(SimulationError):
    """A simulation's books do not add up: the result is not to be trusted, and is not returned."""
