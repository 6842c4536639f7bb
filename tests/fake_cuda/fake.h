/* fake: a CUDA runtime, driver and NVML of the calls that flexkv makes, over host memory; NOT a device, for tests only.
 *
 * Device memory is mapped twice: the address that the caller gets is closed to the host (touching it is a
 * segmentation fault), the streams' threads use another mapping. Every call is counted, handles and registrations
 * are counted while they live, the calling thread's device is compared with that of pointers and streams, whatever
 * synchronizes aborts the process, and faults are injected by name of a call or kind of work. One lock guards all. */
#ifndef FAKE_H
#define FAKE_H
#include <pthread.h>
#include <stdint.h>
#include <stddef.h>

#ifndef FAKE_CUDART_VERSION
#define FAKE_CUDART_VERSION 13000
#endif
#define API __attribute__((visibility("default")))
#define FAKE_DEVICES 2

enum { /* cudaError_t, as driver_types.h of CUDA 12 and 13 numbers them */
  OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
  MAP_FAILED_CUDA = 205, INVALID_HANDLE = 400, SYMBOL_NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
  ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, LAUNCH_FAILURE = 719,
};
enum { LIVE_MEMORY, LIVE_STREAMS, LIVE_EVENTS, LIVE_REGISTRATIONS, LIVE_IMPORTS, LIVE_LIBRARIES, LIVE_KINDS };
enum { WORK_COPY, WORK_KERNEL, WORK_EVENT, WORK_WAIT, WORK_HOST, WORK_KINDS };
enum { FAULT_REFUSED, FAULT_PARTIAL, FAULT_FAILED, FAULT_LOST, FAULT_SLOW, FAULT_CONTEXT };

typedef struct { /* as flexkv's fx_plane */
  uint64_t base;
  int64_t block_stride, stride[3];
  uint32_t count[3], segment_bytes;
  uint64_t offset;
} fake_plane;

typedef struct { /* as the argument of flexkv's kernel */
  uint64_t planes, slots, blocks, host_base, host_stride;
  uint32_t n_planes, n_blocks, to_device, segments;
} fake_move;

typedef struct fake_memory {
  uint64_t address, alias, size;
  int fd, device, imported, process; /* process: a descriptor of the exporter, -1 for memory of our own */
  int opened;                        /* how often it was imported */
  struct { uint32_t pid; int32_t fd; uint64_t id; } name;
  struct fake_memory *next;
} fake_memory;

typedef struct { uint64_t target, source, width, height, target_pitch, source_pitch; int to_device; } fake_piece;

typedef struct fake_work {
  int kind, to_device;
  uint64_t number;
  struct fake_work *next;
  fake_move move;
  struct fake_event *event;
  struct fake_stream *other;
  uint64_t other_number;
  void (*function)(void *);
  void *argument;
  uint32_t pieces;
  fake_piece piece[];
} fake_work;

typedef struct fake_stream {
  int device, closing, waits;
  pthread_cond_t wake;
  uint64_t given, done, void_from, void_to; /* void: what a lost context took with it */
  fake_work *first, *last;
  pthread_t thread;
  uint64_t random;
  struct fake_stream *next;
} fake_stream;

typedef struct fake_event { int device; fake_stream *stream; uint64_t number; } fake_event;

extern pthread_mutex_t fake_lock;
extern pthread_cond_t fake_changed;
extern int fake_context_error[FAKE_DEVICES], fake_held;
extern int64_t fake_living[LIVE_KINDS];
extern _Thread_local int fake_device;

/* faults.c */
int fake_enter(int *id, const char *name, int releases); /* with the lock taken; the error that the call must return */
int fake_leave(int error);
void fake_violation(const char *format, ...);
int fake_drawn(const char *name, int *fault, uint64_t *amount, int *error);
uint64_t fake_jitter_ns(fake_stream *stream);
void fake_break_context(int device, int error);

/* memory.c: all with the lock held */
fake_memory *fake_find(uint64_t address, uint64_t size);
int fake_registered(uint64_t address, uint64_t size); /* 1: in one registration, 0: in none, -1: across their edge */
int fake_alive(const fake_memory *memory);

/* streams.c: all with the lock held */
fake_stream *fake_resolve(void *handle);
fake_work *fake_make(int kind, uint32_t pieces);
void fake_give(fake_stream *stream, fake_work *work);
void fake_purge(int device); /* drop all that is queued */
void fake_wake(void);        /* the streams that have something to do */

/* work.c: without the lock */
int fake_do(fake_stream *stream, fake_work *work, uint64_t limit);

#define ENTER_AS(releases)                                            \
  static int id_of_call = -1;                                         \
  int error = fake_enter(&id_of_call, __func__, releases);            \
  if (error && !(releases)) return fake_leave(error)
#define ENTER ENTER_AS(0)
#endif
