/* faults.c: what goes wrong on purpose, and the jitter. */
#define _GNU_SOURCE
#include <errno.h>

#include "device.h"

const fault *sim_draw_fault(sim_device *device, uint32_t kind, int refusals) {
  for (uint32_t i = 0; i < device->n_faults; i++) {
    fault *f = &device->faults[i];
    if ((f->kind != kind && f->kind != SIM_KINDS) || (f->fault == SIM_REFUSED) != refusals || !f->times) continue;
    if (f->skip) {
      f->skip--;
      continue;
    }
    f->times--;
    return f;
  }
  return NULL;
}

/* splitmix64 */
uint64_t sim_draw_jitter(sim_device *device) {
  if (!device->model.jitter_ns) return 0;
  uint64_t z = device->random += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return (z ^ (z >> 31)) % (device->model.jitter_ns + 1);
}

int sim_fault(sim_device *device, uint32_t kind_of_fault, uint32_t kind, uint32_t skip, uint32_t times,
              uint64_t amount) {
  if (kind_of_fault > SIM_SLOW || kind > SIM_KINDS) return -EINVAL;
  pthread_mutex_lock(&device->lock);
  uint32_t kept = 0;
  for (uint32_t i = 0; i < device->n_faults; i++)
    if (device->faults[i].times) device->faults[kept++] = device->faults[i];
  int full = kept == MAX_FAULTS;
  if (!full) device->faults[kept++] = (fault){kind_of_fault, kind, skip, times, amount};
  device->n_faults = kept;
  pthread_mutex_unlock(&device->lock);
  return full ? -ENOSPC : 0;
}

void sim_clear_faults(sim_device *device) {
  pthread_mutex_lock(&device->lock);
  device->n_faults = 0;
  pthread_mutex_unlock(&device->lock);
}
