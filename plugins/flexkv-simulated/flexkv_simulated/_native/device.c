/* device.c: streams, engines and the thread that tells. One lock, one condition: work comes in batches.
 *
 * An engine is a thread. It takes the head of a stream whose work before it is done, waits until the bytes must start
 * to move, moves them without the lock, waits for the finish of the model, and hands the work to the caller thread,
 * which completes tickets and runs host functions. */
#define _GNU_SOURCE
#include "device.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define NEVER UINT64_MAX
/* How long before its finish a copy begins to move bytes: what this machine may need for them. */
#define LEAD_NS 30000u
#define BYTES_PER_LEAD_NS 3u

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint64_t latest(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* Wait for a change, at most until `moment`. */
static void wait_until(sim_device *device, uint64_t moment) {
  struct timespec until = {(time_t)(moment / 1000000000u), (long)(moment % 1000000000u)};
  if (moment == NEVER)
    pthread_cond_wait(&device->changed, &device->lock);
  else
    pthread_cond_timedwait(&device->changed, &device->lock, &until);
}

static int runs(const sim_device *device) { return !device->closing && !device->error; }

static void void_range(stream *s, uint64_t from, uint64_t to) {
  if (from > to) return;
  if (from < s->void_from) s->void_from = from;
  if (to > s->void_to) s->void_to = to;
}

/* ---- what happens to work that is done ---------------------------------------------------------------- */

static void tell_later(sim_device *device, work *item) {
  work **place = &device->calls_due;
  while (*place && (*place)->call_ns <= item->call_ns) place = &(*place)->next;
  item->next = *place;
  *place = item;
}

/* The work of a stream is over at `finish_ns`; the work behind it may go on. */
static void finish(sim_device *device, work *item) {
  stream *s = &device->streams[item->stream];
  s->running = NULL;
  s->done = item->number;
  s->ready_ns = item->finish_ns;
  if (item->error || !runs(device)) void_range(s, item->number, item->number);
}

/* Start what needs no engine: a wait that is over, a host function. */
static void advance(sim_device *device) {
  for (int again = 1; again && runs(device);) {
    again = 0;
    for (uint32_t i = 0; i < device->n_streams; i++) {
      stream *s = &device->streams[i];
      work *head = s->running ? NULL : s->first;
      if (!head || head->kind < SIM_KINDS) continue;
      if (head->kind == SIM_WAIT && device->streams[head->other].done < head->other_number) continue;
      s->first = head->next;
      head->finish_ns = latest(head->submitted_ns, s->ready_ns);
      if (head->kind == SIM_WAIT) {
        head->finish_ns = latest(head->finish_ns, device->streams[head->other].ready_ns);
        finish(device, head);
        free(head);
      } else {
        s->running = head;
        head->call_ns = head->finish_ns;
        tell_later(device, head);
      }
      again = 1;
    }
  }
  pthread_cond_broadcast(&device->changed);
}

static void *call(void *argument) {
  sim_device *device = argument;
  prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
  pthread_mutex_lock(&device->lock);
  while (!device->closing) {
    work *item = device->calls_due;
    if (device->error || !item || item->call_ns > now_ns()) {
      wait_until(device, device->error || !item ? NEVER : item->call_ns);
      continue;
    }
    device->calls_due = item->next;
    pthread_mutex_unlock(&device->lock);
    if (item->kind == SIM_HOST)
      item->function(item->ticket);
    else if (item->error)
      device->calls.failed(item->ticket, item->error);
    else
      device->calls.landed(item->ticket);
    pthread_mutex_lock(&device->lock);
    if (item->kind == SIM_HOST) {
      finish(device, item);
      advance(device);
    }
    free(item);
  }
  pthread_mutex_unlock(&device->lock);
  return NULL;
}

/* ---- engines ------------------------------------------------------------------------------------------- */

/* The next work that an engine of this kind may do; streams take turns. */
static work *take(sim_device *device, uint32_t kind) {
  for (uint32_t i = 0; i < device->n_streams; i++) {
    uint32_t at = (device->turn + i) % device->n_streams;
    stream *s = &device->streams[at];
    if (s->running || !s->first || s->first->kind != kind) continue;
    s->running = s->first;
    s->first = s->running->next;
    device->turn = (at + 1) % device->n_streams;
    return s->running;
  }
  return NULL;
}

/* How long the work takes; what a fault does to it. */
static uint64_t draw(sim_device *device, work *item, int *sticky) {
  uint64_t rate = device->model.bytes_per_s[item->kind];
  uint64_t cost = device->model.latency_ns[item->kind] + item->duration_ns + sim_draw_jitter(device);
  if (rate) cost += (uint64_t)((double)item->size_bytes * 1e9 / (double)rate);
  const fault *hit = sim_draw_fault(device, item->kind, 0);
  if (!hit) return cost;
  if (hit->fault == SIM_FAILED || hit->fault == SIM_STICKY) {
    if (hit->amount < item->blocks) item->blocks = (uint32_t)hit->amount;
    item->error = EIO;
  }
  *sticky = hit->fault == SIM_STICKY;
  item->silent = hit->fault == SIM_LOST;
  item->call_ns = hit->fault == SIM_LATE ? hit->amount : 0;
  return hit->fault == SIM_SLOW ? cost + hit->amount : cost;
}

static void note(sim_device *device, const work *item, uint64_t ready, uint64_t start, uint64_t landed) {
  device->history[device->n_history++ % HISTORY] =
      (sim_record){item->kind,         item->stream, item->number,    item->size_bytes, item->submitted_ns,
                   ready,              start,        item->finish_ns, landed};
}

static void serve(engine *self, work *item) {
  sim_device *device = self->device;
  int sticky = 0;
  uint64_t ready = device->streams[item->stream].ready_ns, landed = 0;
  uint64_t start = latest(latest(item->submitted_ns, ready), self->free_ns);
  uint64_t cost = draw(device, item, &sticky), lead = LEAD_NS + item->size_bytes / BYTES_PER_LEAD_NS;
  item->finish_ns = self->free_ns = start + cost;
  uint64_t move_ns = item->finish_ns - (lead < cost ? lead : cost);
  while (runs(device) && now_ns() < move_ns) wait_until(device, move_ns);
  if (runs(device)) {
    pthread_mutex_unlock(&device->lock);
    sim_do_work(&device->calls, item);
    landed = now_ns();
    pthread_mutex_lock(&device->lock);
  }
  while (runs(device) && now_ns() < item->finish_ns) wait_until(device, item->finish_ns);
  if (!runs(device) && now_ns() < item->finish_ns) item->finish_ns = self->free_ns = now_ns(); /* cut short */
  if (sticky) device->error = EIO;
  if (landed) note(device, item, ready, start, landed);
  finish(device, item);
  item->call_ns += item->finish_ns;
  if (runs(device) && item->ticket && !item->silent)
    tell_later(device, item);
  else
    free(item);
  advance(device);
}

static void *serve_all(void *argument) {
  engine *self = argument;
  sim_device *device = self->device;
  prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
  pthread_mutex_lock(&device->lock);
  while (!device->closing) {
    work *item = device->error || device->paused ? NULL : take(device, self->kind);
    if (item)
      serve(self, item);
    else
      wait_until(device, NEVER);
  }
  pthread_mutex_unlock(&device->lock);
  return NULL;
}

/* ---- devices ------------------------------------------------------------------------------------------- */

static int start_threads(sim_device *device) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = pthread_create(&device->caller, NULL, call, device);
  device->caller_runs = !error;
  for (uint32_t kind = 0; kind < SIM_KINDS && !error; kind++)
    for (uint32_t i = 0; i < device->model.engines[kind] && !error; i++) {
      engine *e = &device->engines[device->n_engines];
      *e = (engine){.device = device, .kind = kind};
      error = device->n_engines == MAX_ENGINES ? EINVAL : pthread_create(&e->thread, NULL, serve_all, e);
      device->n_engines += !error;
    }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return error;
}

sim_device *sim_open(const sim_model *model, const sim_calls *calls) {
  sim_device *device = calloc(1, sizeof *device);
  if (!device) return NULL;
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_mutex_init(&device->lock, NULL);
  pthread_cond_init(&device->changed, &monotonic);
  pthread_condattr_destroy(&monotonic);
  device->model = *model;
  device->calls = *calls;
  device->random = model->seed;
  device->process = getpid();
  int error = start_threads(device);
  if (!error) return device;
  sim_close(device);
  errno = error;
  return NULL;
}

/* Drop what has not started and what was not told; wait until the engines are idle. With the lock held. */
static void drop_all(sim_device *device) {
  pthread_cond_broadcast(&device->changed);
  for (work *item = device->calls_due, *next; item; item = next) {
    next = item->next;
    stream *s = &device->streams[item->stream];
    if (s->running == item) s->running = NULL;
    void_range(s, item->number, item->number);
    free(item);
  }
  device->calls_due = NULL;
  for (uint32_t i = 0; i < device->n_streams; i++) {
    stream *s = &device->streams[i];
    while (s->running) wait_until(device, NEVER);
    void_range(s, s->done + 1, s->given);
    for (work *item = s->first, *next; item; item = next) {
      next = item->next;
      free(item);
    }
    s->first = s->last = NULL;
    s->done = s->given;
  }
}

void sim_reset(sim_device *device) {
  pthread_mutex_lock(&device->lock);
  if (!device->error) device->error = ECANCELED; /* stops the engines */
  drop_all(device);
  device->error = 0;
  pthread_cond_broadcast(&device->changed);
  pthread_mutex_unlock(&device->lock);
}

void sim_close(sim_device *device) {
  if (getpid() != device->process) return; /* a forked child has no threads of it */
  pthread_mutex_lock(&device->lock);
  device->closing = 1;
  pthread_cond_broadcast(&device->changed);
  pthread_mutex_unlock(&device->lock);
  for (uint32_t i = 0; i < device->n_engines; i++) pthread_join(device->engines[i].thread, NULL);
  if (device->caller_runs) pthread_join(device->caller, NULL);
  pthread_mutex_lock(&device->lock);
  drop_all(device);
  pthread_mutex_unlock(&device->lock);
  pthread_cond_destroy(&device->changed);
  pthread_mutex_destroy(&device->lock);
  free(device);
}

void sim_pause(sim_device *device, int paused) {
  pthread_mutex_lock(&device->lock);
  device->paused = paused;
  pthread_cond_broadcast(&device->changed);
  pthread_mutex_unlock(&device->lock);
}

int sim_stream_open(sim_device *device) {
  pthread_mutex_lock(&device->lock);
  int number = device->n_streams < MAX_STREAMS ? (int)device->n_streams++ : -EMFILE;
  if (number >= 0) device->streams[number].void_from = NEVER;
  pthread_mutex_unlock(&device->lock);
  return number;
}

int sim_error(sim_device *device) {
  pthread_mutex_lock(&device->lock);
  int error = device->error;
  pthread_mutex_unlock(&device->lock);
  return error;
}

/* ---- work ---------------------------------------------------------------------------------------------- */

static int64_t enqueue(sim_device *device, uint32_t number, work *item) {
  if (!item) return -ENOMEM;
  int64_t answer = -EINVAL;
  if (getpid() != device->process) {
    free(item);
    return -ENODEV;
  }
  pthread_mutex_lock(&device->lock);
  if (device->error)
    answer = -device->error;
  else if (number < device->n_streams && item->other < device->n_streams)
    answer = sim_draw_fault(device, item->kind, 1) ? -EIO : 0;
  if (!answer) {
    stream *s = &device->streams[number];
    item->stream = number;
    item->submitted_ns = now_ns();
    item->number = ++s->given;
    answer = (int64_t)item->number;
    if (s->first)
      s->last->next = item;
    else
      s->first = item;
    s->last = item;
    advance(device);
  } else {
    free(item);
  }
  pthread_mutex_unlock(&device->lock);
  return answer;
}

int64_t sim_submit(sim_device *device, uint32_t number, uint32_t kind, const sim_batch *batch, void *ticket) {
  if (kind > SIM_STORAGE || !device->model.engines[kind]) return -EINVAL;
  work *item = sim_make_work(kind, batch, device->calls.plane_bytes);
  if (item) item->ticket = ticket;
  return enqueue(device, number, item);
}

int64_t sim_compute(sim_device *device, uint32_t number, uint64_t duration_ns, void *ticket) {
  if (!device->model.engines[SIM_COMPUTE]) return -EINVAL;
  work *item = sim_make_work(SIM_COMPUTE, NULL, 0);
  if (item) item->duration_ns = duration_ns, item->ticket = ticket;
  return enqueue(device, number, item);
}

int64_t sim_host_function(sim_device *device, uint32_t number, void (*function)(void *), void *argument) {
  work *item = sim_make_work(SIM_HOST, NULL, 0);
  if (item) item->function = function, item->ticket = argument;
  return enqueue(device, number, item);
}

int64_t sim_wait(sim_device *device, uint32_t number, uint32_t other, uint64_t other_number) {
  work *item = sim_make_work(SIM_WAIT, NULL, 0);
  if (item) item->other = other, item->other_number = other_number;
  return enqueue(device, number, item);
}

static int query(sim_device *device, const stream *s, uint64_t number) {
  if (s->running && s->running->number == number) return -EINPROGRESS;
  if (number > s->done) return device->error ? -device->error : -EINPROGRESS;
  return s->void_from <= number && number <= s->void_to ? -EIO : 0;
}

int sim_query(sim_device *device, uint32_t number_of_stream, uint64_t number) {
  return sim_synchronize(device, number_of_stream, number, 0);
}

int sim_synchronize(sim_device *device, uint32_t number_of_stream, uint64_t number, uint32_t timeout_ms) {
  uint64_t deadline = now_ns() + (uint64_t)timeout_ms * 1000000u;
  pthread_mutex_lock(&device->lock);
  int answer = -EINVAL;
  if (number_of_stream < device->n_streams) {
    const stream *s = &device->streams[number_of_stream];
    while ((answer = query(device, s, number)) == -EINPROGRESS && now_ns() < deadline) wait_until(device, deadline);
  }
  pthread_mutex_unlock(&device->lock);
  return answer;
}

int sim_withdraw(sim_device *device, uint32_t number_of_stream, uint64_t number) {
  int answer = sim_query(device, number_of_stream, number);
  if (answer == -EINPROGRESS) return answer;
  pthread_mutex_lock(&device->lock);
  for (work **place = &device->calls_due; *place; place = &(*place)->next) {
    work *item = *place;
    if (item->stream != number_of_stream || item->number != number) continue;
    *place = item->next;
    free(item);
    break;
  }
  pthread_mutex_unlock(&device->lock);
  return answer;
}

uint32_t sim_history(sim_device *device, sim_record *records, uint32_t capacity) {
  pthread_mutex_lock(&device->lock);
  uint64_t kept = device->n_history < HISTORY ? device->n_history : HISTORY;
  uint32_t count = kept < capacity ? (uint32_t)kept : capacity;
  for (uint32_t i = 0; i < count; i++)
    records[i] = device->history[(device->n_history - count + i) % HISTORY];
  pthread_mutex_unlock(&device->lock);
  return count;
}
