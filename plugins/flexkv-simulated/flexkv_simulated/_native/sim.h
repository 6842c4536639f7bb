/* sim: an accelerator in software. Memory that the host cannot touch, streams, copy engines, host callbacks, faults.
 *
 * Time. Work starts when it has been submitted, the work before it in its stream is finished and an engine of its
 * kind is free; it holds that engine for latency + bytes / bandwidth (+ jitter):
 *     start = max(submitted, stream ready, engine free);  finish = start + latency + bytes / bandwidth + jitter
 * These are moments of the model: a machine that wakes us late delays one completion, not those behind it. Nothing
 * completes before its finish; bytes land as late as the machine allows. Times in ns of CLOCK_MONOTONIC. */
#ifndef SIM_H
#define SIM_H
#include <stdint.h>

/* What an engine can do; work of any stream goes to the first engine of its kind that is free. */
enum { SIM_TO_DEVICE, SIM_FROM_DEVICE, SIM_STORAGE, SIM_COMPUTE, SIM_KINDS };

/* ---- memory */

typedef struct {
  uint64_t address; /* what the host sees: any access to it is a segmentation fault */
  uint64_t alias;   /* where the engines reach the same bytes */
  uint64_t size;
  int fd; /* the memory as a file, for other processes */
} sim_memory;

/* Take `size` bytes of device memory, or (fd >= 0) map those of another process; 0 or -errno. The descriptor is
 * duplicated. */
int sim_memory_open(int fd, uint64_t size, sim_memory *memory);
void sim_memory_close(sim_memory *memory); /* no work may be in flight on it */

/* ---- devices */

typedef struct {
  uint32_t engines[4];
  uint64_t latency_ns[4];
  uint64_t bytes_per_s[4]; /* 0: no time at all */
  uint64_t jitter_ns;      /* every piece of work takes up to this much longer */
  uint64_t seed;           /* of the jitter */
} sim_model;

/* What the device calls: completion of a ticket, and the two kernels that move and sum blocks. */
typedef struct {
  void (*landed)(void *ticket);
  void (*failed)(void *ticket, int error);
  void (*copy_blocks)(const void *planes, uint32_t n_planes, uint64_t host_base, uint64_t host_stride,
                      const uint32_t *host_slots, const uint32_t *device_blocks, uint32_t n, int to_device);
  void (*checksum)(uint64_t base, uint64_t stride, const uint32_t *slots, uint64_t size, const uint64_t *keys,
                   uint32_t n, uint64_t *sums);
  uint32_t plane_bytes; /* size of one of `planes` */
} sim_calls;

typedef struct sim_device sim_device;

sim_device *sim_open(const sim_model *model, const sim_calls *calls); /* NULL and errno on failure */
void sim_close(sim_device *device); /* drops what is queued, waits for the engines */
int sim_stream_open(sim_device *device); /* its number, or -EMFILE */

/* ---- work; all return the number of the work in its stream (> 0), or -errno */

typedef struct {
  const void *planes; /* their bases are aliases */
  uint32_t n_planes;
  uint64_t host_base, host_stride;
  const uint32_t *host_slots; /* copies */
  const uint32_t *device_blocks;
  uint32_t count;
  uint64_t block_bytes; /* what time is charged for */
  const int32_t *files; /* storage: where the blocks lie, and the sums of their first `sum_bytes` bytes */
  const uint64_t *offsets, *keys, *checksums;
  uint64_t read_bytes, sum_bytes;
  uint8_t *statuses; /* storage: written before completion; must outlive the ticket */
} sim_batch;

/* Copy a batch, or (SIM_STORAGE) read it from files; then complete the ticket (NULL: nobody) from a thread of the
 * device. Arrays are copied. */
int64_t sim_submit(sim_device *device, uint32_t stream, uint32_t kind, const sim_batch *batch, void *ticket);
int64_t sim_compute(sim_device *device, uint32_t stream, uint64_t duration_ns, void *ticket);
/* Call function(argument) from a thread of the device when all before it in the stream is done. */
int64_t sim_host_function(sim_device *device, uint32_t stream, void (*function)(void *), void *argument);
/* Hold the stream until work `number` of stream `other` is done. */
int64_t sim_wait(sim_device *device, uint32_t stream, uint32_t other, uint64_t number);

/* Has this work finished? 0, -EINPROGRESS while a byte of it may still land, or -errno when it failed. */
int sim_query(sim_device *device, uint32_t stream, uint64_t number);
/* The same; of work that is over, the completion is not told any more if it has not been. */
int sim_withdraw(sim_device *device, uint32_t stream, uint64_t number);
/* As sim_query, but wait for it, up to `timeout_ms`. */
int sim_synchronize(sim_device *device, uint32_t stream, uint64_t number, uint32_t timeout_ms);
void sim_pause(sim_device *device, int paused); /* whether engines take no more work */
int sim_error(sim_device *device);  /* the sticky error, or 0 */
void sim_reset(sim_device *device); /* drop everything, wait for the engines, forget a sticky error */

/* ---- faults */

enum {
  SIM_REFUSED, /* submitting fails */
  SIM_FAILED,  /* only the first `amount` blocks are moved, and the ticket fails with EIO */
  SIM_STICKY,  /* the same, without any completion; from now on everything fails until the reset */
  SIM_LOST,    /* the work is done, but nobody is told */
  SIM_LATE,    /* the work is done, but it is told `amount` ns later */
  SIM_SLOW     /* the work takes `amount` ns longer */
};

/* Hits `times` pieces of work of `kind` (SIM_KINDS: any) after the first `skip`; -ENOSPC when too many are in force. */
int sim_fault(sim_device *device, uint32_t fault, uint32_t kind, uint32_t skip, uint32_t times, uint64_t amount);
void sim_clear_faults(sim_device *device);

/* ---- what happened */

typedef struct {
  uint64_t kind, stream, number, size_bytes;
  uint64_t submitted_ns, ready_ns, start_ns, finish_ns; /* of the model; ready: the work before it was finished */
  uint64_t landed_ns;                                   /* of the clock: when the last byte was there */
} sim_record;

/* The last `capacity` pieces of work, oldest first; returns how many. */
uint32_t sim_history(sim_device *device, sim_record *records, uint32_t capacity);
#endif
