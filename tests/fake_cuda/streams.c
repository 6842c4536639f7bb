/* streams.c: streams with a thread each, events, and what is queued. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "fake.h"

static fake_stream *default_streams[FAKE_DEVICES];
static fake_stream *streams; /* all that are open, default ones too */
static uint64_t opened;

static void nap(uint64_t ns) {
  struct timespec time = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
  while (ns && nanosleep(&time, &time) < 0 && errno == EINTR) continue;
}

static int ready(const fake_stream *s) {
  if (!s->first || fake_held || fake_context_error[s->device]) return 0;
  return s->first->kind != WORK_WAIT || s->first->other->done >= s->first->other_number;
}

static const char *const NAMES[WORK_KINDS] = {"copy", "kernel", "event", "wait", "callback"};

/* Do one piece of work, with what faults make of it; the lock is held before and after. */
static void serve(fake_stream *s, fake_work *work) {
  int fault = -1, code = 0, error = 0;
  uint64_t amount = 0, limit = UINT64_MAX, wait = fake_jitter_ns(s);
  if (fake_drawn(NAMES[work->kind], &fault, &amount, &code)) {
    if (fault == FAULT_FAILED) limit = amount;
    if (fault == FAULT_SLOW) wait += amount * 1000;
  }
  pthread_mutex_unlock(&fake_lock);
  nap(wait);
  if (work->kind == WORK_COPY || work->kind == WORK_KERNEL) error = fake_do(s, work, limit);
  if (work->kind == WORK_HOST && fault != FAULT_LOST) work->function(work->argument);
  pthread_mutex_lock(&fake_lock);
  if (fault == FAULT_FAILED || fault == FAULT_CONTEXT) error = code;
  if (error) fake_break_context(s->device, error);
}

static void *run(void *argument) {
  fake_stream *s = argument;
  pthread_mutex_lock(&fake_lock);
  while (!s->closing || (s->first && !fake_context_error[s->device])) {
    if (!ready(s)) {
      s->waits = 1;
      pthread_cond_wait(&s->wake, &fake_lock);
      s->waits = 0;
      continue;
    }
    fake_work *work = s->first;
    s->first = work->next;
    serve(s, work);
    if (work->number > s->done) s->done = work->number;
    free(work);
    pthread_cond_broadcast(&fake_changed);
    fake_wake();
  }
  pthread_mutex_unlock(&fake_lock);
  return NULL;
}

/* Only those: threads that wake up for nothing take the cores and the lock from the caller. */
void fake_wake(void) {
  for (fake_stream *s = streams; s; s = s->next)
    if (s->waits && (s->closing || ready(s))) pthread_cond_signal(&s->wake);
}

static fake_stream *open_stream(int device) {
  fake_stream *s = calloc(1, sizeof *s);
  sigset_t all, before;
  s->device = device;
  pthread_cond_init(&s->wake, NULL);
  s->random = ++opened;
  s->next = streams;
  streams = s;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  if (pthread_create(&s->thread, NULL, run, s)) abort();
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return s;
}

fake_stream *fake_resolve(void *handle) {
  if ((uintptr_t)handle > 2) {
    for (fake_stream *s = streams; s; s = s->next)
      if (s == handle && !s->closing) return s;
    fake_violation("a stream that is not open was used");
    return NULL;
  }
  if (!default_streams[fake_device]) default_streams[fake_device] = open_stream(fake_device);
  return default_streams[fake_device];
}

fake_work *fake_make(int kind, uint32_t pieces) {
  fake_work *work = calloc(1, sizeof *work + pieces * sizeof(fake_piece));
  if (!work) abort();
  work->kind = kind;
  work->pieces = pieces;
  return work;
}

void fake_give(fake_stream *s, fake_work *work) {
  work->number = ++s->given;
  if (s->first)
    s->last->next = work;
  else
    s->first = work;
  s->last = work;
  if (s->waits && ready(s)) pthread_cond_signal(&s->wake);
}

void fake_purge(int device) {
  for (fake_stream *s = streams; s; s = s->next) {
    if (s->device != device || s->done == s->given) continue;
    for (fake_work *work = s->first, *next; work; work = next) {
      next = work->next;
      free(work);
    }
    s->first = s->last = NULL;
    s->void_from = s->done + 1, s->void_to = s->done = s->given;
  }
}

/* ---- calls ---------------------------------------------------------------------------------------------- */

API int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
  ENTER;
  (void)priority;
  if (flags != 1) fake_violation("a stream that waits for the default stream was made");
  *stream = open_stream(fake_device);
  fake_living[LIVE_STREAMS]++;
  return fake_leave(OK);
}

/* A stream as an engine has: of the current device, counted like all. */
API void *fake_engine_stream(void) {
  pthread_mutex_lock(&fake_lock);
  void *made = open_stream(fake_device);
  fake_living[LIVE_STREAMS]++;
  fake_leave(0);
  return made;
}

API int cudaStreamDestroy(void *handle) {
  ENTER_AS(1);
  fake_stream *s = fake_resolve(handle);
  if (!s) return fake_leave(INVALID_HANDLE);
  s->closing = 1;
  fake_living[LIVE_STREAMS]--;
  fake_wake();
  pthread_mutex_unlock(&fake_lock);
  pthread_join(s->thread, NULL);
  pthread_mutex_lock(&fake_lock);
  for (fake_work *work = s->first, *next; work; work = next) {
    next = work->next;
    free(work);
  }
  s->first = NULL; /* the structure stays: events may point to it */
  return fake_leave(error);
}

static int device_is(const fake_stream *s, const char *what) {
  if (s->device == fake_device) return 1;
  fake_violation("%s: a stream of device %d, while device %d is current", what, s->device, fake_device);
  return 0;
}

API int cudaStreamQuery(void *handle) {
  ENTER;
  fake_stream *s = fake_resolve(handle);
  if (!s || !device_is(s, __func__)) return fake_leave(INVALID_HANDLE);
  return fake_leave(s->done < s->given ? NOT_READY : OK);
}

API int cudaEventCreateWithFlags(void **event, unsigned flags) {
  ENTER;
  if (flags != 2) fake_violation("an event with timing was made");
  fake_event *made = calloc(1, sizeof *made);
  made->device = fake_device;
  *event = made;
  fake_living[LIVE_EVENTS]++;
  return fake_leave(OK);
}

API int cudaEventDestroy(void *event) {
  ENTER_AS(1);
  free(event);
  fake_living[LIVE_EVENTS]--;
  return fake_leave(error);
}

API int cudaEventRecord(void *handle, void *stream) {
  ENTER;
  fake_event *event = handle;
  fake_stream *s = fake_resolve(stream);
  if (!s || !device_is(s, __func__) || s->device != event->device) return fake_leave(INVALID_HANDLE);
  fake_work *work = fake_make(WORK_EVENT, 0);
  fake_give(s, work);
  event->stream = s, event->number = work->number;
  return fake_leave(OK);
}

API int cudaEventQuery(void *handle) {
  ENTER;
  fake_event *event = handle;
  const fake_stream *s = event->stream;
  if (s && s->void_from <= event->number && event->number <= s->void_to) return fake_leave(LAUNCH_FAILURE);
  return fake_leave(s && s->done < event->number ? NOT_READY : OK);
}

API int cudaStreamWaitEvent(void *stream, void *handle, unsigned flags) {
  ENTER;
  fake_event *event = handle;
  fake_stream *s = fake_resolve(stream);
  if (!s || flags || !device_is(s, __func__)) return fake_leave(INVALID_HANDLE);
  if (!event->stream) return fake_leave(OK);
  fake_work *work = fake_make(WORK_WAIT, 0);
  work->other = event->stream, work->other_number = event->number;
  fake_give(s, work);
  return fake_leave(OK);
}

API int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *argument) {
  ENTER;
  fake_stream *s = fake_resolve(stream);
  if (!s || !device_is(s, __func__)) return fake_leave(INVALID_HANDLE);
  fake_work *work = fake_make(WORK_HOST, 0);
  work->function = function, work->argument = argument;
  fake_give(s, work);
  return fake_leave(OK);
}
