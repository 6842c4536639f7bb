/* crew: a few worker threads for work that would stall the loop (copies, checksums). */
#ifndef FX_CREW_H
#define FX_CREW_H
#include <stdint.h>

typedef struct fx_crew fx_crew;

fx_crew *fx_crew_open(uint32_t threads, uint32_t queue_depth); /* NULL and errno on failure */
uint32_t fx_crew_threads(fx_crew *crew);
int fx_crew_close(fx_crew *crew);  /* runs what is queued, then joins */
void fx_crew_leave(fx_crew *crew); /* the same, but waits for nobody: the last thread frees the crew */

/* Queue work(argument) for any thread; the work frees its argument and completes its own ticket. From any thread.
 * Returns 0, or -EAGAIN when the queue is full (then nothing happened). */
int fx_crew_run(fx_crew *crew, void (*work)(void *argument), void *argument);

/* Sleep on a crew thread, then complete (error 0) or fail one part of the ticket: for tests and simulated devices.
 * Returns 0, -EAGAIN or -ENOMEM. */
int fx_crew_delay(fx_crew *crew, uint32_t delay_us, uint64_t ticket, int error);
#endif
