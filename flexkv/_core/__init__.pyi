"""Types of the C core, one section per header; the headers say what each function does."""

from typing import TypeAlias

from _cffi_backend import FFI, _CDataBase

CData: TypeAlias = _CDataBase

class Library:
    # --- slots.h
    def fx_slots_to_blocks(
        self, slots: CData, wide: int, n: int, tokens: int, limit: int, blocks: CData
    ) -> int: ...

    # --- hub.h
    def fx_hub_open(self, tickets: int) -> CData: ...
    def fx_hub_fd(self, hub: CData) -> int: ...
    def fx_hub_max_parts(self) -> int: ...
    def fx_ticket_take(self, hub: CData, parts: int) -> int: ...
    def fx_complete(self, ticket: CData) -> None: ...
    def fx_fail(self, ticket: CData, error: int) -> None: ...
    def fx_settle(self, ticket: int, error: int, wake: int) -> None: ...
    def fx_hub_in_flight(self, hub: CData) -> int: ...
    def fx_hub_stale(self, hub: CData) -> int: ...
    def fx_hub_drain(self, hub: CData, done: CData, capacity: int) -> int: ...
    def fx_hub_close(self, hub: CData, timeout_ms: int) -> int: ...

    # --- crew.h
    def fx_crew_open(self, threads: int, queue_depth: int) -> CData: ...
    def fx_crew_threads(self, crew: CData) -> int: ...
    def fx_crew_close(self, crew: CData) -> int: ...
    def fx_crew_run(self, crew: CData, work: CData, argument: CData) -> int: ...
    def fx_crew_delay(self, crew: CData, delay_us: int, ticket: int, error: int) -> int: ...

    # --- ring.h
    def fx_ring_built(self) -> int: ...
    def fx_ring_probe(self) -> int: ...
    def fx_ring_open(self, hub: CData, depth: int, max_bytes_in_flight: int) -> CData: ...
    def fx_ring_queue(
        self,
        ring: CData,
        mode: int,
        n: int,
        fds: CData,
        offsets: CData,
        addresses: CData,
        lengths: CData,
        results: CData,
        ticket: int,
    ) -> int: ...
    def fx_ring_submit(self, ring: CData) -> int: ...
    def fx_ring_reap(self, ring: CData) -> int: ...
    def fx_ring_in_flight(self, ring: CData) -> int: ...
    def fx_ring_queued(self, ring: CData) -> int: ...
    def fx_ring_close(self, ring: CData) -> int: ...

    # --- records.h
    def fx_records_seal(self, records: CData, slots: CData, seeds: CData, n: int) -> None: ...
    def fx_records_check(
        self, records: CData, first: int, n: int, seed: int, states: CData
    ) -> int: ...
    def fx_records_write(
        self, n: int, fds: CData, offsets: CData, records: CData, results: CData
    ) -> int: ...
    def fx_crew_write_records(
        self,
        crew: CData,
        n: int,
        fds: CData,
        offsets: CData,
        records: CData,
        results: CData,
        ticket: int,
    ) -> int: ...

    # --- copy.h
    def fx_copy_blocks(
        self,
        planes: CData,
        n_planes: int,
        host_base: int,
        host_stride: int,
        host_slots: CData,
        device_blocks: CData,
        n: int,
        to_device: int,
    ) -> None: ...
    def fx_crew_copy(
        self,
        crew: CData,
        planes: CData,
        n_planes: int,
        host_base: int,
        host_stride: int,
        host_slots: CData,
        device_blocks: CData,
        n: int,
        to_device: int,
        ticket: int,
    ) -> int: ...
    def fx_checksum_blocks(
        self, base: int, stride: int, slots: CData, size: int, keys: CData, n: int, sums: CData
    ) -> None: ...
    def fx_crew_checksum(
        self,
        crew: CData,
        base: int,
        stride: int,
        slots: CData,
        size: int,
        keys: CData,
        n: int,
        sums: CData,
        ticket: int,
    ) -> int: ...
    def fx_crew_move(
        self, crew: CData, sources: CData, targets: CData, size: int, n: int, ticket: int
    ) -> int: ...
    def fx_prefault(self, address: int, size: int) -> int: ...
    def fx_copy_plain(
        self, sources: CData, targets: CData, size: int, n: int, kind: int
    ) -> None: ...

    # --- hash.h

    # --- runs.h

    # --- index.h

ffi: FFI
lib: Library
