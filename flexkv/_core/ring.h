/* ring: io_uring reads and writes in batches, completed through the hub's eventfd. */
#ifndef FX_RING_H
#define FX_RING_H
#include <stdint.h>
#include "hub.h"

typedef struct fx_ring fx_ring;

int fx_ring_built(void); /* 1 when liburing was there at build time */
int fx_ring_probe(void); /* 0, or -errno that says why io_uring cannot be used here (-ENOSYS: not built) */
fx_ring *fx_ring_open(fx_hub *hub, uint32_t depth, uint64_t max_bytes_in_flight); /* NULL and errno */

/* Queue n I/Os (write 0/1) as ONE part of `ticket`. All arrays but `results` are copied. results[i] becomes the
 * bytes moved or -errno; short I/O is continued inside. Neighbours in file and memory may be merged. */
int fx_ring_queue(fx_ring *ring, int write, uint32_t n, const int32_t *fds, const uint64_t *offsets,
                  const uint64_t *addresses, const uint32_t *lengths, int32_t *results, uint64_t ticket);
int fx_ring_submit(fx_ring *ring); /* once per loop tick */
int fx_ring_reap(fx_ring *ring);   /* from the loop, before fx_hub_drain; refills the ring itself */
uint32_t fx_ring_in_flight(fx_ring *ring);
int fx_ring_close(fx_ring *ring); /* waits for what is in flight */
#endif
