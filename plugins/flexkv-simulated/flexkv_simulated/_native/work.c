/* work.c: see work.h. What an engine does with the bytes of a batch. */
#define _GNU_SOURCE
#include "work.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ALIGNMENT 4096u /* of files opened with O_DIRECT */
enum { LANDED, FAILED, DAMAGED }; /* flexkv.model.IOStatus */

/* Copy an array behind the structure; the arrays come in order of their alignment. */
static const void *tuck(uint8_t **end, const void *source, size_t size) {
  if (!source || !size) return NULL;
  void *place = memcpy(*end, source, size);
  *end += (size + 7) & ~(size_t)7;
  return place;
}

work *sim_make_work(uint32_t kind, const sim_batch *batch, uint32_t plane_bytes) {
  static const sim_batch nothing;
  if (!batch) batch = &nothing;
  size_t n = batch->count, planes = (size_t)batch->n_planes * plane_bytes;
  work *item = calloc(1, sizeof *item + planes + n * (3 * sizeof(uint32_t) + 4 * sizeof(uint64_t)) + 8 * 8);
  if (!item) return NULL;
  uint8_t *end = (uint8_t *)(item + 1);
  item->kind = kind;
  item->blocks = batch->count;
  item->size_bytes = n * batch->block_bytes;
  item->batch = *batch;
  item->batch.planes = tuck(&end, batch->planes, planes);
  item->batch.offsets = tuck(&end, batch->offsets, n * sizeof(uint64_t));
  item->batch.keys = tuck(&end, batch->keys, 2 * n * sizeof(uint64_t));
  item->batch.checksums = tuck(&end, batch->checksums, n * sizeof(uint64_t));
  item->batch.host_slots = tuck(&end, batch->host_slots, n * sizeof(uint32_t));
  item->batch.device_blocks = tuck(&end, batch->device_blocks, n * sizeof(uint32_t));
  item->batch.files = tuck(&end, batch->files, n * sizeof(int32_t));
  return item;
}

static int read_whole(int fd, uint8_t *target, size_t size, off_t offset) {
  while (size) {
    ssize_t got = pread(fd, target, size, offset);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return 0; /* an error, or the file ends too early */
    target += got;
    offset += got;
    size -= (size_t)got;
  }
  return 1;
}

/* Storage to device, block by block through memory that belongs to the engine; the arena is not touched. */
static void read_blocks(const sim_calls *calls, const work *item) {
  const sim_batch *batch = &item->batch;
  const uint32_t first = 0;
  uint8_t *bounce = aligned_alloc(ALIGNMENT, (batch->read_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
  for (uint32_t i = 0; i < batch->count; i++) {
    uint64_t sum = 0, place = (uint64_t)(uintptr_t)bounce;
    batch->statuses[i] = FAILED;
    if (!bounce || i >= item->blocks) continue;
    if (!read_whole(batch->files[i], bounce, batch->read_bytes, (off_t)batch->offsets[i])) continue;
    calls->checksum(place, 0, &first, batch->sum_bytes, batch->keys + 2 * i, 1, &sum);
    if (sum != batch->checksums[i]) {
      batch->statuses[i] = DAMAGED;
      continue;
    }
    calls->copy_blocks(batch->planes, batch->n_planes, place, 0, &first, batch->device_blocks + i, 1, 1);
    batch->statuses[i] = LANDED;
  }
  free(bounce);
}

void sim_do_work(const sim_calls *calls, const work *item) {
  const sim_batch *batch = &item->batch;
  if (item->kind == SIM_STORAGE)
    read_blocks(calls, item);
  else if (item->kind != SIM_COMPUTE)
    calls->copy_blocks(batch->planes, batch->n_planes, batch->host_base, batch->host_stride, batch->host_slots,
                       batch->device_blocks, item->blocks, item->kind == SIM_TO_DEVICE);
}
