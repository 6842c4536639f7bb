/* hub: tickets that any thread may complete, and one eventfd that tells the loop.
 *
 * A ticket is a preallocated slot that counts down `parts`; its number carries a generation, so a late or
 * duplicate completion of a recycled slot is ignored. The number cast to void* is what goes to hardware
 * callbacks: fx_complete has the type of cudaHostFn_t, hipHostFn_t and aclrtHostFunc. */
#ifndef FX_HUB_H
#define FX_HUB_H
#include <stdint.h>

typedef struct fx_hub fx_hub;

typedef struct {
  uint64_t ticket;
  int32_t failed; /* parts that failed */
  int32_t error;  /* errno of the first failure, or 0 */
} fx_done;

fx_hub *fx_hub_open(uint32_t tickets); /* NULL and errno on failure */
int fx_hub_fd(fx_hub *hub);
uint64_t fx_ticket_take(fx_hub *hub, uint32_t parts); /* 0 when none is free */
void fx_complete(void *ticket);                       /* one part landed; any thread, no GIL needed */
void fx_fail(void *ticket, int error);                /* one part failed */
uint32_t fx_hub_in_flight(fx_hub *hub);
uint32_t fx_hub_drain(fx_hub *hub, fx_done *done, uint32_t capacity); /* call until 0 */
int fx_hub_close(fx_hub *hub, uint32_t timeout_ms); /* waits for tickets in flight; 0, or how many stayed out */
#endif
