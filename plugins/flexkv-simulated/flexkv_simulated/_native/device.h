/* device.h: what device.c and faults.c share. */
#ifndef SIM_DEVICE_H
#define SIM_DEVICE_H
#include <pthread.h>
#include <sys/types.h>

#include "work.h"

enum { MAX_STREAMS = 64, MAX_ENGINES = 64, MAX_FAULTS = 16, HISTORY = 4096 };

typedef struct {
  work *first, *last; /* queued */
  work *running;      /* on an engine, or its host function is called */
  uint64_t given, done; /* numbers: of the work queued last, and finished last */
  uint64_t ready_ns;    /* when the work finished last was finished */
  uint64_t void_from, void_to; /* work in this range may have failed; empty: from > to */
} stream;

typedef struct {
  struct sim_device *device;
  uint32_t kind;
  uint64_t free_ns;
  pthread_t thread;
} engine;

typedef struct {
  uint32_t fault, kind, skip, times;
  uint64_t amount;
} fault;

struct sim_device {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  sim_model model;
  sim_calls calls;
  pid_t process;
  int closing, error, paused;
  uint64_t random;
  stream streams[MAX_STREAMS];
  uint32_t n_streams, turn; /* turn: the stream that is asked first */
  engine engines[MAX_ENGINES];
  uint32_t n_engines;
  pthread_t caller;
  int caller_runs;
  work *calls_due; /* finished work whose completion is still to be told, soonest first */
  fault faults[MAX_FAULTS];
  uint32_t n_faults;
  sim_record history[HISTORY];
  uint64_t n_history;
};

/* The fault that hits this piece of work, counted off, or NULL. `refusals`: ask for SIM_REFUSED only, else for the
 * others. With the lock held. */
const fault *sim_draw_fault(sim_device *device, uint32_t kind, int refusals);
/* Up to jitter_ns more. With the lock held. */
uint64_t sim_draw_jitter(sim_device *device);
#endif
