/* faults.c: counting calls, what lives and what is wrong; faults on purpose; the control panel of tests. */
#define _GNU_SOURCE
#include "fake.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CALLS 128
#define FAULTS 32

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t fake_changed = PTHREAD_COND_INITIALIZER;
int fake_context_error[FAKE_DEVICES], fake_held;
int64_t fake_living[LIVE_KINDS];
_Thread_local int fake_device;

static struct { const char *name; uint64_t calls; } calls[CALLS];
static int n_calls, process;
static struct { char name[48]; int fault, error; uint64_t skip, times, amount; } faults[FAULTS];
static uint64_t violations, jitter_us;
static char last_violation[256];

void fake_violation(const char *format, ...) {
  va_list rest;
  va_start(rest, format);
  vsnprintf(last_violation, sizeof last_violation, format, rest);
  va_end(rest);
  violations++;
}

/* What the next call or work of this name is to suffer; 0 when nothing. */
int fake_drawn(const char *name, int *fault, uint64_t *amount, int *error) {
  for (int i = 0; i < FAULTS; i++) {
    if (!faults[i].times || strcmp(faults[i].name, name)) continue;
    if (faults[i].skip) {
      faults[i].skip--;
      continue;
    }
    if (faults[i].times != UINT64_MAX) faults[i].times--;
    *fault = faults[i].fault, *amount = faults[i].amount, *error = faults[i].error;
    return 1;
  }
  return 0;
}

void fake_break_context(int device, int error) {
  if (!fake_context_error[device]) fake_context_error[device] = error;
  fake_purge(device);
  pthread_cond_broadcast(&fake_changed);
  fake_wake();
}

int fake_enter(int *id, const char *name, int releases) {
  pthread_mutex_lock(&fake_lock);
  if (*id < 0) {
    if (n_calls == CALLS) abort();
    *id = n_calls++;
    calls[*id].name = name;
  }
  calls[*id].calls++;
  if (!process && strncmp(name, "nvml", 4)) process = getpid();
  if (process && process != getpid() && strncmp(name, "nvml", 4)) return NOT_INITIALIZED;
  int fault, error;
  uint64_t amount;
  if (!releases && fake_drawn(name, &fault, &amount, &error)) {
    if (fault == FAULT_CONTEXT) fake_break_context(fake_device, error);
    if (fault != FAULT_PARTIAL) return error;
  }
  return strncmp(name, "nvml", 4) ? fake_context_error[fake_device] : 0;
}

int fake_leave(int error) {
  pthread_mutex_unlock(&fake_lock);
  return error;
}

uint64_t fake_jitter_ns(fake_stream *stream) {
  if (!jitter_us) return 0;
  stream->random = stream->random * 6364136223846793005u + 1442695040888963407u;
  return (stream->random >> 33) % (jitter_us * 1000);
}

/* ---- for tests ------------------------------------------------------------------------------------------ */

/* Let `times` calls or pieces of work called `name`, after the first `skip`, go wrong. */
API int fake_inject(const char *name, int fault, int error, uint64_t skip, uint64_t times, uint64_t amount) {
  pthread_mutex_lock(&fake_lock);
  int at = 0;
  while (at < FAULTS && faults[at].times) at++;
  if (at < FAULTS) {
    snprintf(faults[at].name, sizeof faults[at].name, "%s", name);
    faults[at].fault = fault, faults[at].error = error, faults[at].skip = skip;
    faults[at].times = times, faults[at].amount = amount;
  }
  return fake_leave(at < FAULTS ? 0 : -1);
}

API void fake_clear(void) {
  pthread_mutex_lock(&fake_lock);
  memset(faults, 0, sizeof faults);
  fake_leave(0);
}

/* Forget lost contexts: what a new process would find. */
API void fake_heal(void) {
  pthread_mutex_lock(&fake_lock);
  memset(fake_context_error, 0, sizeof fake_context_error);
  fake_wake();
  fake_leave(0);
}

API void fake_hold(int held) {
  pthread_mutex_lock(&fake_lock);
  fake_held = held;
  fake_wake();
  fake_leave(0);
}

API void fake_jitter(uint64_t us) {
  pthread_mutex_lock(&fake_lock);
  jitter_us = us;
  fake_leave(0);
}

API uint64_t fake_calls(const char *name) {
  uint64_t found = 0;
  pthread_mutex_lock(&fake_lock);
  for (int i = 0; i < n_calls; i++)
    if (!strcmp(calls[i].name, name)) found += calls[i].calls;
  fake_leave(0);
  return found;
}

API int64_t fake_live(int kind) {
  pthread_mutex_lock(&fake_lock);
  int64_t found = fake_living[kind];
  fake_leave(0);
  return found;
}

/* How often a rule was broken; `last` (of 256 bytes) gets the last of it. */
API uint64_t fake_violations(char *last) {
  pthread_mutex_lock(&fake_lock);
  uint64_t found = violations;
  memcpy(last, last_violation, sizeof last_violation);
  fake_leave(0);
  return found;
}

API void fake_pardon(void) {
  pthread_mutex_lock(&fake_lock);
  violations = 0;
  fake_leave(0);
}
