/* ring: io_uring reads and writes in batches, completed through the hub's eventfd.
 *
 * A batch is a job: any number of I/Os that are ONE part of a ticket. Jobs are served in turns, reads before most
 * writes, so a long batch does not starve a short one. All calls belong to the loop's thread. */
#ifndef FX_RING_H
#define FX_RING_H
#include <stdint.h>
#include "hub.h"

typedef struct fx_ring fx_ring;

int fx_ring_built(void); /* 1 when liburing was there at build time */

/* 0, or -errno that says why io_uring cannot be used here: -ENOSYS not built, no kernel support or seccomp; -EPERM
 * seccomp or sysctl kernel.io_uring_disabled; -ENOMEM memlock limit (old kernels); -EOPNOTSUPP kernel before 5.6. */
int fx_ring_probe(void);

/* At most `depth` I/Os (1 to 4096) and `max_bytes_in_flight` bytes (but always one I/O) are with the kernel.
 * NULL and errno, as fx_ring_probe, or EINVAL. */
fx_ring *fx_ring_open(fx_hub *hub, uint32_t depth, uint64_t max_bytes_in_flight);

/* Tell the kernel once where the memory is, so that it need not find and pin the pages of every I/O. All of it is
 * pinned until fx_ring_close: touch it first. Takes time (0.1 s/GiB and more): call it from another thread, before the
 * first fx_ring_queue and not beside other calls for this ring. I/O outside, or across a multiple of 1 GiB from `base`,
 * works as before. Returns 0 or -errno (-ENOMEM: locked-memory limit, RLIMIT_MEMLOCK), which changes nothing. */
int fx_ring_register(fx_ring *ring, uint64_t base, uint64_t size);

/* Queue n I/Os as ONE part of `ticket`; nothing starts before fx_ring_submit. All arrays but `results` are copied.
 * results[i] becomes the bytes moved or -errno, and the part fails unless every entry moved all its bytes: short I/O
 * is continued inside, so fewer bytes mean end of file (EIO). Neighbours in file and memory are merged up to 1 MiB;
 * if that fails they are tried one by one, so each has its own result. `mode`: 0 read, 1 write, +2 for files opened
 * without O_DIRECT (the kernel's threads do the work, so that submitting does not copy).
 * Returns 0, -EAGAIN (4096 jobs wait; nothing was queued), -EINVAL (a length of 0 or over 2 GiB) or -ENOMEM. */
int fx_ring_queue(fx_ring *ring, int mode, uint32_t n, const int32_t *fds, const uint64_t *offsets,
                  const uint64_t *addresses, const uint32_t *lengths, int32_t *results, uint64_t ticket);

/* Once per loop tick. Returns 0, or -errno when the kernel took nothing and nothing is on its way: call again. */
int fx_ring_submit(fx_ring *ring);
int fx_ring_reap(fx_ring *ring);            /* before fx_hub_drain; refills the ring. Returns completed I/Os */
uint32_t fx_ring_in_flight(fx_ring *ring);  /* I/Os started (merged entries are one) */
uint64_t fx_ring_queued(fx_ring *ring);     /* entries not started */
int fx_ring_close(fx_ring *ring);           /* cancels what has not started, waits for what has */
#endif
