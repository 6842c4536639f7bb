/* work.c: copies and the kernel: what is checked when they are queued, and what a stream's thread does. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "fake.h"

enum { TO_DEVICE = 1, TO_HOST = 2 };

/* ---- queueing ------------------------------------------------------------------------------------------- */

static uint64_t reach(const fake_piece *p, uint64_t pitch) { return pitch * (p->height - 1) + p->width; }

/* 0, or the error of a piece; sets `pageable` when its host memory is not pinned. */
static int check(const fake_stream *s, fake_piece *p, int *pageable) {
  uint64_t on_device = p->to_device ? p->target : p->source, on_host = p->to_device ? p->source : p->target;
  uint64_t device_pitch = p->to_device ? p->target_pitch : p->source_pitch;
  uint64_t host_pitch = p->to_device ? p->source_pitch : p->target_pitch;
  if (!p->width || !p->height || (p->height > 1 && (device_pitch < p->width || host_pitch < p->width)))
    return INVALID_VALUE;
  const fake_memory *m = fake_find(on_device, reach(p, device_pitch));
  if (!m) return INVALID_VALUE;
  if (m->device != s->device || s->device != fake_device) {
    fake_violation("a copy of memory of device %d in a stream of %d, %d is current", m->device, s->device,
                   fake_device);
    return INVALID_HANDLE;
  }
  int pinned = fake_registered(on_host, reach(p, host_pitch));
  if (pinned < 0) return INVALID_VALUE; /* across the edge of a registration */
  *pageable |= !pinned;
  return OK;
}

/* Queue pieces; memory that is not pinned makes the caller wait, as with the real runtime. */
static int queue(void *stream, fake_work *work) {
  fake_stream *s = fake_resolve(stream);
  int error = s ? OK : INVALID_HANDLE, pageable = 0;
  for (uint32_t i = 0; i < work->pieces && !error; i++) error = check(s, &work->piece[i], &pageable);
  if (error) {
    free(work);
    return error;
  }
  fake_give(s, work);
  uint64_t number = work->number;
  while (pageable && s->done < number && !fake_context_error[s->device])
    pthread_cond_wait(&fake_changed, &fake_lock);
  return pageable ? fake_context_error[s->device] : OK;
}

API int cudaMemcpyAsync(void *target, const void *source, size_t size, int kind, void *stream) {
  ENTER;
  if (kind != TO_DEVICE && kind != TO_HOST) return fake_leave(INVALID_VALUE);
  fake_work *work = fake_make(WORK_COPY, 1);
  work->piece[0] = (fake_piece){(uintptr_t)target, (uintptr_t)source, size, 1, 0, 0, kind == TO_DEVICE};
  return fake_leave(queue(stream, work));
}

API int cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                          size_t height, int kind, void *stream) {
  ENTER;
  if (kind != TO_DEVICE && kind != TO_HOST) return fake_leave(INVALID_VALUE);
  fake_work *work = fake_make(WORK_COPY, 1);
  work->piece[0] = (fake_piece){(uintptr_t)target, (uintptr_t)source, width, height, target_pitch, source_pitch,
                                kind == TO_DEVICE};
  return fake_leave(queue(stream, work));
}

#if FAKE_CUDART_VERSION >= 12080
typedef struct { int order; struct { int type, id; } source, target; unsigned flags; } copy_attributes;

static int batch(void **targets, void **sources, size_t *sizes, size_t count, copy_attributes *attributes,
                 size_t *starts, size_t n_attributes, size_t *failed, void *stream) {
  int fault = -1, code = 0, cut = 0;
  uint64_t amount = 0;
  if (!count || n_attributes != 1 || starts[0] || attributes->order < 1 || attributes->order > 3 ||
      (uintptr_t)stream <= 2)
    return INVALID_VALUE; /* the documented rules; the default streams are refused */
  if (fake_drawn("batch", &fault, &amount, &code) && fault == FAULT_PARTIAL && amount < count)
    cut = 1, count = amount, *failed = amount;
  fake_work *work = fake_make(WORK_COPY, (uint32_t)count);
  for (size_t i = 0; i < count; i++) {
    int to_device = fake_find((uintptr_t)targets[i], 1) != NULL;
    work->piece[i] = (fake_piece){(uintptr_t)targets[i], (uintptr_t)sources[i], sizes[i], 1, 0, 0, to_device};
  }
  int error = queue(stream, work);
  return error ? error : cut ? code : OK;
}

#if FAKE_CUDART_VERSION >= 13000
API int cudaMemcpyBatchAsync(void **targets, void **sources, size_t *sizes, size_t count,
                             copy_attributes *attributes, size_t *starts, size_t n_attributes, void *stream) {
  ENTER;
  size_t failed;
  return fake_leave(batch(targets, sources, sizes, count, attributes, starts, n_attributes, &failed, stream));
}
#else
API int cudaMemcpyBatchAsync(void **targets, void **sources, size_t *sizes, size_t count,
                             copy_attributes *attributes, size_t *starts, size_t n_attributes, size_t *failed,
                             void *stream) {
  ENTER;
  return fake_leave(batch(targets, sources, sizes, count, attributes, starts, n_attributes, failed, stream));
}
#endif
#endif

/* ---- the kernel ----------------------------------------------------------------------------------------- */

static int library, kernel;
static uint64_t most_blocks;

API int cuInit(unsigned flags) {
  ENTER;
  return fake_leave(flags ? INVALID_VALUE : OK);
}

API int cuLibraryLoadData(void **loaded, const void *code, void *a, void *b, unsigned n, void *c, void *d,
                          unsigned m) {
  ENTER;
  (void)a, (void)b, (void)c, (void)d;
  if (n || m || !strstr(code, ".entry flexkv_move")) return fake_leave(INVALID_VALUE);
  *loaded = &library;
  fake_living[LIVE_LIBRARIES]++;
  return fake_leave(OK);
}

API int cuLibraryUnload(void *loaded) {
  ENTER_AS(1);
  if (loaded != &library) return fake_leave(INVALID_HANDLE);
  fake_living[LIVE_LIBRARIES]--;
  return fake_leave(error);
}

API int cuLibraryGetKernel(void **found, void *loaded, const char *name) {
  ENTER;
  if (loaded != &library || strcmp(name, "flexkv_move")) return fake_leave(SYMBOL_NOT_FOUND);
  *found = &kernel;
  return fake_leave(OK);
}

API int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned shared, void *stream, void **arguments, void **extra) {
  ENTER;
  fake_stream *s = fake_resolve(stream);
  uint64_t blocks = (uint64_t)gx * gy * gz, threads = (uint64_t)bx * by * bz;
  if (function != &kernel || !s || !blocks || !threads || threads > 1024 || threads % 32 || shared || extra)
    return fake_leave(INVALID_VALUE);
  if (s->device != fake_device) {
    fake_violation("a kernel in a stream of device %d, while device %d is current", s->device, fake_device);
    return fake_leave(INVALID_HANDLE);
  }
  if (blocks > most_blocks) most_blocks = blocks;
  fake_work *work = fake_make(WORK_KERNEL, 0);
  memcpy(&work->move, arguments[0], sizeof work->move);
  fake_give(s, work);
  return fake_leave(OK);
}

/* The largest grid so far. */
API uint64_t fake_most_blocks(void) { return most_blocks; }

/* ---- a stream's thread ---------------------------------------------------------------------------------- */

/* What a device may do with `size` bytes at `address` of its own memory: the place to do it, or NULL. */
static uint8_t *place_of(const fake_stream *s, uint64_t address, uint64_t size) {
  pthread_mutex_lock(&fake_lock);
  const fake_memory *m = fake_find(address, size);
  uint8_t *found = NULL;
  if (m && m->device == s->device && fake_alive(m)) found = (uint8_t *)(uintptr_t)(m->alias + (address - m->address));
  fake_leave(0);
  return found;
}

static int mapped(uint64_t address, uint64_t size) {
  pthread_mutex_lock(&fake_lock);
  return fake_leave(fake_registered(address, size)) > 0;
}

static int move_rows(const fake_stream *s, const fake_piece *p) {
  uint64_t on_device = p->to_device ? p->target : p->source;
  uint8_t *device = place_of(s, on_device, reach(p, p->to_device ? p->target_pitch : p->source_pitch));
  if (!device) return ILLEGAL_ADDRESS;
  for (uint64_t row = 0; row < p->height; row++)
    if (p->to_device)
      memcpy(device + row * p->target_pitch, (void *)(uintptr_t)(p->source + row * p->source_pitch), p->width);
    else
      memcpy((void *)(uintptr_t)(p->target + row * p->target_pitch), device + row * p->source_pitch, p->width);
  return OK;
}

/* Where the bytes of a plane are for all blocks of the launch, checked at once: the shift from its addresses to the
 * streams' mapping, or 0. */
static uint64_t shift_of(const fake_stream *s, const fake_move *move, const fake_plane *p) {
  const uint32_t *slots = (void *)(uintptr_t)move->slots, *blocks = (void *)(uintptr_t)move->blocks;
  int64_t low = INT64_MAX, high = INT64_MIN;
  uint64_t size = (uint64_t)p->count[0] * p->count[1] * p->count[2] * p->segment_bytes, shift = 0;
  int good = 1;
  pthread_mutex_lock(&fake_lock);
  for (uint32_t i = 0; i < move->n_blocks; i++) {
    int64_t at = (int64_t)blocks[i] * p->block_stride;
    uint64_t host = move->host_base + slots[i] * move->host_stride + p->offset;
    low = at < low ? at : low, high = at > high ? at : high;
    good &= fake_registered(host, 1) > 0 && fake_registered(host + size - 1, 1) > 0;
  }
  for (int axis = 0; axis < 3; axis++) {
    int64_t reach = p->stride[axis] * (int64_t)(p->count[axis] - 1);
    if (reach < 0) low += reach;
    else high += reach;
  }
  uint64_t first = p->base + (uint64_t)low;
  const fake_memory *m = fake_find(first, (uint64_t)(high - low) + p->segment_bytes);
  if (good && m && m->device == s->device && fake_alive(m)) shift = m->alias - m->address;
  fake_leave(0);
  return shift;
}

static void move_block(const fake_move *move, const fake_plane *p, uint32_t i, uint64_t shift) {
  const uint32_t *slots = (void *)(uintptr_t)move->slots, *blocks = (void *)(uintptr_t)move->blocks;
  uint64_t host = move->host_base + slots[i] * move->host_stride + p->offset;
  uint64_t base = p->base + (uint64_t)((int64_t)blocks[i] * p->block_stride) + shift, size = p->segment_bytes;
  for (int64_t x = 0; x < p->count[0]; x++)
    for (int64_t y = 0; y < p->count[1]; y++)
      for (int64_t z = 0; z < p->count[2]; z++, host += size) {
        uint64_t device = base + (uint64_t)(x * p->stride[0] + y * p->stride[1] + z * p->stride[2]);
        if (move->to_device)
          memcpy((void *)(uintptr_t)device, (void *)(uintptr_t)host, size);
        else
          memcpy((void *)(uintptr_t)host, (void *)(uintptr_t)device, size);
      }
}

static int run_kernel(const fake_stream *s, const fake_move *move, uint64_t limit) {
  if (!mapped(move->planes, move->n_planes * sizeof(fake_plane)) || !mapped(move->slots, 4 * move->n_blocks) ||
      !mapped(move->blocks, 4 * move->n_blocks))
    return ILLEGAL_ADDRESS;
  const fake_plane *planes = (void *)(uintptr_t)move->planes;
  uint64_t segments = 0;
  for (uint32_t p = 0; p < move->n_planes; p++)
    segments += (uint64_t)planes[p].count[0] * planes[p].count[1] * planes[p].count[2];
  if (segments != move->segments) return ILLEGAL_ADDRESS;
  for (uint32_t p = 0; p < move->n_planes; p++) {
    uint64_t shift = shift_of(s, move, &planes[p]);
    if (!shift) return ILLEGAL_ADDRESS;
    for (uint32_t i = 0; i < move->n_blocks && i < limit; i++) move_block(move, &planes[p], i, shift);
  }
  return OK;
}

int fake_do(fake_stream *s, fake_work *work, uint64_t limit) {
  if (work->kind == WORK_KERNEL) return run_kernel(s, &work->move, limit);
  int error = OK;
  for (uint32_t i = 0; i < work->pieces && i < limit && !error; i++) error = move_rows(s, &work->piece[i]);
  return error;
}
