"""What `flexkv doctor` looks at, one function per subject; each yields findings, changes nothing.

`check_host` - `check_io_uring` - `check_directory` (really writes one block) - `check_memory` -
`check_plugins` - `check_config` - `check_torch`.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import resource
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from flexkv import plugins
from flexkv.bench.report import cpu_facts, cpu_name
from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError, PluginError
from flexkv.model import PAGE_BYTES

State = Literal["ok", "note", "missing", "unusable"]
_FEATURES = ("sse4_2", "avx2", "avx512f", "avx512bw", "amx_bf16", "asimd", "sve")
_RING_ADVICE = {
    errno.EPERM: "a container or sysctl forbids it: run the container with a seccomp profile that "
    "allows io_uring, or `sysctl -w kernel.io_uring_disabled=0`",
    errno.ENOSYS: "this kernel has no io_uring: Linux 5.6 or newer has",
    errno.ENOMEM: "locked memory is too small: `ulimit -l unlimited`",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about the machine; `advice` is what to type where something is missing."""

    subject: str
    state: State
    detail: str
    advice: str = ""


def check_host() -> Iterator[Finding]:
    """Python, kernel and processor."""
    yield Finding("python", "ok", f"{platform.python_implementation()} {platform.python_version()}")
    yield Finding("kernel", "ok", f"{platform.system()} {platform.release()} {platform.machine()}")
    flags = set(next(iter(cpu_facts("flags") or cpu_facts("Features")), "").split())
    features = (
        ", ".join(name for name in _FEATURES if name in flags) or "no known vector extensions"
    )
    yield Finding("cpu", "ok", f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, {features}")


def check_io_uring() -> Iterator[Finding]:
    """Whether io_uring was built in and may be used: opens a ring and closes it."""
    try:
        from flexkv._core import ffi, lib
    except ImportError as error:
        yield Finding("native core", "unusable", str(error), "install flexkv again, see README.md")
        return
    yield Finding("native core", "ok", "flexkv._core")
    if not lib.fx_ring_built():
        advice = "`apt-get install liburing-dev`, then install flexkv again"
        yield Finding("io_uring", "missing", "this build has none; disk I/O uses threads", advice)
        return
    hub = lib.fx_hub_open(16)
    ring = lib.fx_ring_open(hub, 8, 1 << 20)
    code = ffi.errno
    if ring == ffi.NULL:
        advice = _RING_ADVICE.get(code, "disk I/O uses threads instead")
        yield Finding("io_uring", "missing", os.strerror(code), advice)
    else:
        lib.fx_ring_close(ring)
        yield Finding("io_uring", "ok", "built in and allowed")
    lib.fx_hub_close(hub, 1000)


def check_memory() -> Iterator[Finding]:
    """Memory, huge pages and the limit on locked memory."""
    facts = _meminfo()
    total, free = facts.get("MemTotal", 0), facts.get("MemAvailable", 0)
    yield Finding("memory", "ok", f"{size(total)}, {size(free)} available")
    shmem = _chosen(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    reserved = facts.get("HugePages_Free", 0)
    detail = f"transparent for shared memory: {shmem}; reserved and free: {reserved}"
    if shmem in {"always", "within_size", "advise", "force"} or reserved:
        yield Finding("huge pages", "ok", detail)
    else:
        knob = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
        advice = f"`echo advise > {knob}`, or reserve some: `sysctl -w vm.nr_hugepages=N`"
        yield Finding("huge pages", "missing", detail, advice)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:
        yield Finding("locked memory", "ok", "no limit for this user")
    else:
        advice = "io_uring and devices pin the host tier: `ulimit -l unlimited`"
        yield Finding("locked memory", "note", f"at most {size(soft)}", advice)


def check_directory(path: Path) -> Iterator[Finding]:
    """Whether a directory can hold a disk tier: writes one block with O_DIRECT, then without."""
    subject = f"directory {path}"
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    try:
        space = os.statvfs(there)
        with tempfile.NamedTemporaryFile(dir=there, prefix=".flexkv-doctor-") as file:
            direct = _write_block(file.name, os.O_DIRECT)
            if direct is not None:
                buffered = _write_block(file.name, 0)
                if buffered is not None:
                    raise buffered
    except OSError as error:
        detail = f"{there}: {error.strerror}"
        yield Finding(subject, "unusable", detail, "choose a directory that this user may write to")
        return
    free = f"{size(space.f_bavail * space.f_frsize)} free, {_file_system(there)}"
    if there != path:
        free += "; will be made"
    if direct is None:
        yield Finding(subject, "ok", f"O_DIRECT works, {free}")
    else:
        advice = "reads pass through the page cache; a directory on ext4 or xfs avoids that"
        yield Finding(subject, "note", f"no O_DIRECT ({direct.strerror}), {free}", advice)


def check_plugins(*, probe: bool = True) -> Iterator[Finding]:
    """Every plug-in with its distribution; with `probe`, load it and list its devices."""
    for group in (plugins.BACKENDS, plugins.POLICIES, plugins.CODECS):
        for item in plugins.plugins(group):
            subject = f"{group.removeprefix('flexkv.')}: {item.name}"
            if not probe:
                yield Finding(subject, "ok", item.distribution)
                continue
            try:
                plugins.load(group, item.name)
                found = _devices(item) if group == plugins.BACKENDS else ""
            except PluginError as error:
                advice = f"upgrade or uninstall {item.distribution.split()[0]}"
                yield Finding(subject, "unusable", str(error), advice)
                continue
            yield Finding(subject, "ok", item.distribution + found)


def _devices(item: plugins.Plugin) -> str:
    names = [
        f"{info.name}{f' ({size(info.memory_bytes)})' if info.memory_bytes else ''}"
        for info in item.devices()
    ]
    return f"; devices: {', '.join(names)}" if names else "; no device here"


def check_config(path: Path | None) -> Iterator[Finding]:
    """Whether a configuration is good and fits this machine; its directories are checked too."""
    try:
        config = FlexKVConfig.load(path)
    except ConfigError as error:
        yield Finding("configuration", "unusable", str(error), "see docs/configuration.md")
        return
    yield Finding("configuration", "ok", str(path or "environment and defaults"))
    free = _meminfo().get("MemAvailable", 0)
    if free and config.host_cache_bytes > free:
        detail = f"{size(config.host_cache_bytes)} wanted, {size(free)} available"
        yield Finding("host_cache_bytes", "unusable", detail, "make host_cache_bytes smaller")
    if config.disk_cache_bytes:
        for directory in config.disk_dirs:
            yield from check_directory(directory)


def check_torch(*, load: bool) -> Iterator[Finding]:
    """The version of torch; with `load`, import it and ask for its accelerator."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        yield Finding("torch", "missing", "not installed", "`pip install torch`")
        return
    if not load:
        yield Finding("torch", "ok", f"{found} (not loaded; --torch loads it)")
        return
    from importlib import import_module

    accelerator = import_module("torch").accelerator
    detail = str(accelerator.current_accelerator()) if accelerator.is_available() else "none here"
    yield Finding("torch", "ok", f"{found}, accelerator: {detail}")


def size(size_bytes: int) -> str:
    """Return a size for people: 1536 -> "1.5 KiB"."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def _write_block(path: str, flags: int) -> OSError | None:
    """Write one aligned block; return what went wrong, or None."""
    try:
        descriptor = os.open(path, os.O_WRONLY | flags)
    except OSError as error:
        return error
    try:
        with mmap.mmap(-1, PAGE_BYTES) as block:
            os.pwrite(descriptor, block, 0)
    except OSError as error:
        return error
    finally:
        os.close(descriptor)
    return None


def _file_system(path: Path) -> str:
    """Return the type of the file system that holds `path`."""
    best = ("", "unknown file system")
    real = str(path.resolve())
    for line in Path("/proc/mounts").read_text(errors="replace").splitlines():
        _, mount, kind, *_ = line.split(" ")
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]


def _meminfo() -> dict[str, int]:
    """Return /proc/meminfo in bytes (counts stay counts); empty where there is none."""
    path = Path("/proc/meminfo")
    facts = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        name, _, rest = line.partition(":")
        number, *unit = rest.split()
        facts[name] = int(number) * (1024 if unit else 1)
    return facts


def _chosen(path: Path) -> str:
    """Return the [selected] word of a sysfs file, or "unavailable"."""
    words = path.read_text().split() if path.exists() else []
    return next((word.strip("[]") for word in words if word.startswith("[")), "unavailable")
