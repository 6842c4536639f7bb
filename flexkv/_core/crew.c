/* crew.c: see crew.h. One mutex, one condition: jobs are batches of blocks, so the lock is not what costs. */
#define _GNU_SOURCE
#include "crew.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "hub.h"

typedef struct {
  void (*work)(void *argument);
  void *argument;
} job;

struct fx_crew {
  pthread_mutex_t lock;
  pthread_cond_t filled;
  job *queue; /* a ring of `depth` jobs, the oldest at `first` */
  uint32_t depth, first, count;
  int closing, left_alone;
  uint32_t threads, ended;
  pthread_t thread[];
};

static void release(fx_crew *crew) {
  pthread_cond_destroy(&crew->filled);
  pthread_mutex_destroy(&crew->lock);
  free(crew->queue);
  free(crew);
}

static void *worker(void *argument) {
  fx_crew *crew = argument;
  pthread_mutex_lock(&crew->lock);
  for (;;) {
    while (crew->count == 0 && !crew->closing) pthread_cond_wait(&crew->filled, &crew->lock);
    if (crew->count == 0) break; /* closing, and nothing is left to run */
    job next = crew->queue[crew->first];
    crew->first = (crew->first + 1) % crew->depth;
    crew->count--;
    pthread_mutex_unlock(&crew->lock);
    next.work(next.argument);
    pthread_mutex_lock(&crew->lock);
  }
  int last = ++crew->ended == crew->threads && crew->left_alone;
  pthread_mutex_unlock(&crew->lock);
  if (last) release(crew);
  return NULL;
}

/* Start the threads with all signals blocked: signals belong to the interpreter's main thread. */
static int start_threads(fx_crew *crew, uint32_t threads) {
  sigset_t all, before;
  int error = 0;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (crew->threads < threads && !error) {
    error = pthread_create(&crew->thread[crew->threads], NULL, worker, crew);
    if (!error) pthread_setname_np(crew->thread[crew->threads++], "flexkv-crew");
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return error;
}

fx_crew *fx_crew_open(uint32_t threads, uint32_t queue_depth) {
  if (threads == 0 || threads > 1024 || queue_depth == 0) {
    errno = EINVAL;
    return NULL;
  }
  fx_crew *crew = calloc(1, sizeof *crew + threads * sizeof crew->thread[0]);
  if (!crew) return NULL;
  pthread_mutex_init(&crew->lock, NULL);
  pthread_cond_init(&crew->filled, NULL);
  crew->depth = queue_depth;
  crew->queue = calloc(queue_depth, sizeof *crew->queue);
  int error = crew->queue ? start_threads(crew, threads) : ENOMEM;
  if (error) {
    fx_crew_close(crew);
    errno = error;
    return NULL;
  }
  return crew;
}

uint32_t fx_crew_threads(fx_crew *crew) { return crew->threads; }

int fx_crew_close(fx_crew *crew) {
  pthread_mutex_lock(&crew->lock);
  crew->closing = 1;
  pthread_cond_broadcast(&crew->filled);
  pthread_mutex_unlock(&crew->lock);
  for (uint32_t i = 0; i < crew->threads; i++) pthread_join(crew->thread[i], NULL);
  release(crew);
  return 0;
}

void fx_crew_leave(fx_crew *crew) {
  pthread_mutex_lock(&crew->lock);
  crew->closing = crew->left_alone = 1;
  for (uint32_t i = 0; i < crew->threads; i++) pthread_detach(crew->thread[i]);
  pthread_cond_broadcast(&crew->filled);
  pthread_mutex_unlock(&crew->lock);
}

int fx_crew_run(fx_crew *crew, void (*work)(void *argument), void *argument) {
  pthread_mutex_lock(&crew->lock);
  int full = crew->count == crew->depth;
  if (!full) {
    crew->queue[(crew->first + crew->count++) % crew->depth] = (job){work, argument};
    pthread_cond_signal(&crew->filled);
  }
  pthread_mutex_unlock(&crew->lock);
  return full ? -EAGAIN : 0;
}

typedef struct {
  uint32_t delay_us;
  int error;
  uint64_t ticket;
} nap;

static void take_nap(void *argument) {
  nap *n = argument;
  struct timespec left = {n->delay_us / 1000000, (long)(n->delay_us % 1000000) * 1000};
  while (left.tv_sec + left.tv_nsec && nanosleep(&left, &left) < 0 && errno == EINTR) {
  }
  fx_settle(n->ticket, n->error, 1);
  free(n);
}

int fx_crew_delay(fx_crew *crew, uint32_t delay_us, uint64_t ticket, int error) {
  nap *n = malloc(sizeof *n);
  if (!n) return -ENOMEM;
  *n = (nap){delay_us, error, ticket};
  int queued = fx_crew_run(crew, take_nap, n);
  if (queued < 0) free(n);
  return queued;
}
