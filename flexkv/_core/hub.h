/* hub: tickets that any thread may complete, and one eventfd that tells the loop.
 *
 * A ticket is a preallocated slot that counts down `parts`. Its number holds the hub (8 bits), the slot (20 bits) and
 * a generation (36 bits), so a late or duplicate completion of a recycled slot or of a closed hub is ignored, without
 * touching freed memory. The number cast to void* is what goes to hardware callbacks: fx_complete has the type of
 * cudaHostFn_t, hipHostFn_t and aclrtHostFunc. Taking tickets, draining and closing belong to the loop's thread. */
#ifndef FX_HUB_H
#define FX_HUB_H
#include <stdint.h>

typedef struct fx_hub fx_hub;

typedef struct {
  uint64_t ticket;
  int32_t failed; /* parts that failed */
  int32_t error;  /* errno of the first failure, or 0 */
} fx_done;

fx_hub *fx_hub_open(uint32_t tickets); /* up to 2^20, NULL and errno on failure; at most 255 hubs are open */
int fx_hub_fd(fx_hub *hub);
uint32_t fx_hub_max_parts(void);                      /* most parts of one ticket: 16,383 */
uint64_t fx_ticket_take(fx_hub *hub, uint32_t parts); /* 0 when none is free, or parts is 0 or too large */
void fx_complete(void *ticket);                       /* one part landed; any thread, no GIL needed */
void fx_fail(void *ticket, int error);                /* one part failed with this errno; any thread */
void fx_refuse(void *ticket);                         /* fx_fail with EIO, of the type of a host function */

/* One part landed (error 0) or failed. `wake` 0 is for the loop's own thread, when it drains right after. */
void fx_settle(uint64_t ticket, int error, int wake);

uint32_t fx_hub_in_flight(fx_hub *hub); /* tickets taken and not drained yet */
uint64_t fx_hub_stale(fx_hub *hub);     /* late and duplicate completions that were ignored */

/* Move up to `capacity` finished tickets, oldest first; their slots are free again. Call until it returns 0. */
uint32_t fx_hub_drain(fx_hub *hub, fx_done *done, uint32_t capacity);

/* Wait for tickets in flight, forget what they say, free the hub. Returns 0, or how many stayed out: their
 * completions will be ignored, but the memory they work on must stay mapped. */
int fx_hub_close(fx_hub *hub, uint32_t timeout_ms);
#endif
