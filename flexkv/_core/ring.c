/* ring.c: see ring.h. */
#include "ring.h"

#include <errno.h>
#include <stddef.h>

int fx_ring_built(void) { return 0; }

int fx_ring_probe(void) { return -ENOSYS; }

fx_ring *fx_ring_open(fx_hub *hub, uint32_t depth, uint64_t max_bytes_in_flight) {
  (void)hub, (void)depth, (void)max_bytes_in_flight;
  errno = ENOSYS;
  return NULL;
}

int fx_ring_queue(fx_ring *ring, int write, uint32_t n, const int32_t *fds, const uint64_t *offsets,
                  const uint64_t *addresses, const uint32_t *lengths, int32_t *results, uint64_t ticket) {
  (void)ring, (void)write, (void)n, (void)fds, (void)offsets, (void)addresses, (void)lengths, (void)results;
  (void)ticket;
  return -ENOSYS;
}

int fx_ring_submit(fx_ring *ring) { return (void)ring, -ENOSYS; }

int fx_ring_reap(fx_ring *ring) { return (void)ring, 0; }

uint32_t fx_ring_in_flight(fx_ring *ring) { return (void)ring, 0; }

int fx_ring_close(fx_ring *ring) { return (void)ring, 0; }
