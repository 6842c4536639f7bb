/* crew: a few worker threads for work that would stall the loop (copies, checksums). */
#ifndef FX_CREW_H
#define FX_CREW_H
#include <stdint.h>

typedef struct fx_crew fx_crew;

fx_crew *fx_crew_open(uint32_t threads, uint32_t queue_depth);
uint32_t fx_crew_threads(fx_crew *crew);
int fx_crew_close(fx_crew *crew); /* runs what is queued, then joins */

/* Queue work(argument) for any thread; the work frees its argument and completes its own ticket.
 * Returns 0, or -EAGAIN when the queue is full. */
int fx_crew_run(fx_crew *crew, void (*work)(void *argument), void *argument);
#endif
