"""The arena: aligned, shared by descriptor, never unmapped under a view, refused if too large."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexkv import memory
from flexkv.errors import CapacityError, ClosedError, ConfigError, InputError
from flexkv.memory import Arena, available_bytes, find_shared, map_shared


def mappings(inode: int) -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.split()[4] == str(inode) for line in lines)


def resident_bytes(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


@pytest.mark.parametrize("huge_pages", [True, False])
def test_slots_are_aligned_pages_of_zeros(huge_pages: bool) -> None:
    arena = Arena(3, 8192, huge_pages=huge_pages)
    assert arena.base % 4096 == 0
    assert arena.size_bytes >= 3 * 8192
    for slot in range(3):
        assert arena.address(slot) == arena.base + slot * 8192
        view = arena.view(slot)
        assert view.shape == (8192,)
        assert view.dtype == np.uint8
        assert view.__array_interface__["data"][0] == arena.address(slot)
        assert not view.any()
    assert arena.address(np.uint32(2)) == arena.base + 2 * 8192  # type: ignore[arg-type]
    arena.close()


def test_prefaulted_memory_is_there_before_it_is_touched() -> None:
    lazy = Arena(64, 65536, huge_pages=False, prefault=False)
    assert resident_bytes(lazy) == 0
    lazy.close()
    eager = Arena(64, 65536, huge_pages=False)
    assert resident_bytes(eager) == eager.size_bytes
    eager.close()


def test_prefaulting_keeps_what_is_written() -> None:
    arena = Arena(2, 4096, prefault=False)
    arena.view(1)[:] = 7
    memory._prefault(arena.base, arena.size_bytes)
    assert (arena.view(1) == 7).all()
    arena.close()


def test_views_outlive_close_and_the_last_one_unmaps() -> None:
    arena = Arena(4, 4096)
    inode = os.fstat(arena.fd).st_ino
    view = arena.view(1)
    part = view[100:200].view(np.uint16)
    view[:] = 5
    arena.close()
    assert arena.closed
    assert mappings(inode) == 1
    del view
    assert (part == 0x0505).all()
    del part
    gc.collect()
    assert mappings(inode) == 0


def test_close_without_views_unmaps_at_once_and_twice_is_fine() -> None:
    arena = Arena(4, 4096)
    fd, inode = arena.fd, os.fstat(arena.fd).st_ino
    arena.close()
    arena.close()
    assert mappings(inode) == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    for use in (arena.address, arena.view):
        with pytest.raises(ClosedError, match="arena is closed"):
            use(0)


@pytest.mark.parametrize("slot", [-1, 4, 1 << 40])
def test_slots_that_do_not_exist_are_refused(slot: int) -> None:
    arena = Arena(4, 4096)
    with pytest.raises(InputError, match=f"slot {slot} is not in an arena of 4"):
        arena.address(slot)
    arena.close()


@pytest.mark.parametrize(("slots", "stride"), [(0, 4096), (-1, 4096), (1, 0), (1, 100), (1, 6000)])
def test_nonsense_sizes_are_refused(slots: int, stride: int) -> None:
    with pytest.raises(ConfigError, match=r"at least 1 slot|multiple of 4096"):
        Arena(slots, stride)


@pytest.mark.parametrize("slots", [1 << 22, 1 << 44])
def test_more_than_the_machine_has_is_refused_before_it_is_touched(slots: int) -> None:
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CapacityError, match=r"GiB .* does not fit: .*; lower cpu_cache_gb"):
        Arena(slots, 1 << 20)
    assert len(os.listdir("/proc/self/fd")) == files


def test_available_memory_is_what_the_machine_has_at_most() -> None:
    available = available_bytes()
    assert available is not None
    assert 0 < available <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _fill(connection: Any) -> None:
    from multiprocessing.reduction import recv_handle

    fd = recv_handle(connection)
    slots, stride = connection.recv()
    arena = Arena.attach(fd, slots, stride)
    os.close(fd)
    connection.send(bytes(arena.view(2)[:5]))
    arena.view(3)[:] = 9
    arena.close()
    connection.send(b"done")


def test_another_process_reads_and_writes_through_the_descriptor() -> None:
    from multiprocessing.reduction import send_handle

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    arena = Arena(4, 4096)
    arena.view(2)[:5] = list(b"hello")
    child = context.Process(target=_fill, args=(there,))
    child.start()
    assert child.pid is not None
    send_handle(here, arena.fd, child.pid)
    here.send((4, 4096))
    assert here.recv() == b"hello"
    assert here.recv() == b"done"
    child.join()
    assert child.exitcode == 0
    assert (arena.view(3) == 9).all()
    assert not arena.view(1).any()
    for connection in (here, there):
        connection.close()
    child.close()
    arena.close()


def test_attaching_to_a_file_that_is_too_small_is_refused() -> None:
    arena = Arena(4, 4096, huge_pages=False)
    with pytest.raises(ConfigError, match="cannot be an arena of 5 slots"):
        Arena.attach(arena.fd, 5, 4096)
    arena.close()


def test_shared_memory_is_found_by_address_and_ordinary_memory_is_not() -> None:
    arena = Arena(4, 4096)
    found = find_shared(arena.address(1) + 10, 4096)
    assert found is not None
    fd, offset = found
    assert (os.fstat(fd).st_ino, offset) == (os.fstat(arena.fd).st_ino, 4096 + 10)
    array = map_shared(fd)
    os.close(fd)
    arena.view(1)[10] = 77
    assert array[offset] == 77
    assert find_shared(arena.address(3), arena.size_bytes) is None  # reaches past the mapping
    private = np.zeros(100, np.uint8)
    assert find_shared(private.__array_interface__["data"][0], 100) is None
    anonymous = mmap.mmap(-1, 4096)  # shared with children only: there is no file to open
    base = np.frombuffer(anonymous, np.uint8).__array_interface__["data"][0]
    assert find_shared(base, 10) is None
    arena.close()


def test_shared_memory_is_found_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file:
        array = map_shared(file.fileno())
    found = find_shared(array.__array_interface__["data"][0] + 4096, 4096)
    assert found is not None
    os.write(found[0], b"x")
    os.close(found[0])
    assert (array[0], found[1]) == (ord("x"), 4096)


def test_an_empty_file_cannot_be_mapped(tmp_path: Path) -> None:
    with (tmp_path / "empty").open("w+b") as file, pytest.raises(CapacityError, match="cannot map"):
        map_shared(file.fileno())


def test_importing_memory_does_not_import_torch() -> None:
    code = "import flexkv.memory, flexkv.backends.cpu, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
