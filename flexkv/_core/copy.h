/* copy: blocks between a region (strided device memory that the CPU can reach) and the arena, checksums of blocks. */
#ifndef FX_COPY_H
#define FX_COPY_H
#include <stdint.h>
#include "crew.h"

/* One layer's share of a block: up to three outer loops over segments of contiguous bytes. In the arena the
 * segments follow each other from `offset` in row-major order of the loops. */
typedef struct {
  uint64_t base;        /* address of device block 0 */
  int64_t block_stride; /* bytes between device blocks */
  int64_t stride[3];    /* bytes between segments on the device, outermost first */
  uint32_t count[3];    /* 1 where a loop is unused */
  uint32_t segment_bytes;
  uint64_t offset; /* of the first segment inside the host block */
} fx_plane;

/* Copy n blocks now, in this thread, with non-temporal stores. to_device: 1 scatters arena -> region, 0 gathers. */
void fx_copy_blocks(const fx_plane *planes, uint32_t n_planes, uint64_t host_base, uint64_t host_stride,
                    const uint32_t *host_slots, const uint32_t *device_blocks, uint32_t n, int to_device);

/* The same on the crew, cut into pieces for all its threads, as ONE part of `ticket`. Arrays are copied.
 * This and the other fx_crew_* calls return 0, -ENOMEM, or -EAGAIN when the crew's queue is full; after an error
 * nothing was queued and the ticket is untouched. */
int fx_crew_copy(fx_crew *crew, const fx_plane *planes, uint32_t n_planes, uint64_t host_base, uint64_t host_stride,
                 const uint32_t *host_slots, const uint32_t *device_blocks, uint32_t n, int to_device,
                 uint64_t ticket);

/* sums[i] = XXH3-64 of block i, seeded by its key (keys: 2 x uint64 each): bound to content and name. */
void fx_checksum_blocks(uint64_t base, uint64_t stride, const uint32_t *slots, uint64_t size, const uint64_t *keys,
                        uint32_t n, uint64_t *sums);
/* The same on the crew as ONE part of `ticket`. Inputs are copied; `sums` must outlive the ticket. */
int fx_crew_checksum(fx_crew *crew, uint64_t base, uint64_t stride, const uint32_t *slots, uint64_t size,
                     const uint64_t *keys, uint32_t n, uint64_t *sums, uint64_t ticket);

/* Move n pieces of `size` bytes between plain addresses on the crew, as ONE part of `ticket`. Arrays are copied. */
int fx_crew_move(fx_crew *crew, const uint64_t *sources, const uint64_t *targets, uint32_t size, uint32_t n,
                 uint64_t ticket);

/* Make every page of [address, address + size) present and writable, keeping its bytes: 0 or -errno. */
int fx_prefault(uint64_t address, uint64_t size);

/* Yardsticks for the benchmark: n pieces of `size` bytes (a multiple of 64, targets 64-byte aligned) by memcpy
 * (kind 0), by the plainest non-temporal loop (1), by the page-wise loop that the copies above use (2). */
void fx_copy_plain(const uint64_t *sources, const uint64_t *targets, uint64_t size, uint32_t n, int kind);
#endif
