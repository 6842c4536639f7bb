/* runs: an allocator of the integers [0, capacity) that keeps neighbours together.
 *
 * Free integers form maximal runs. Runs carry their length at both ends (boundary tags), so giving back finds and
 * joins the neighbours without a search; runs of a similar length share a bin, so taking finds one that fits without
 * a search. The same sequence of calls gives the same integers. */
#ifndef FX_RUNS_H
#define FX_RUNS_H
#include <stdint.h>

typedef struct fx_runs fx_runs;

fx_runs *fx_runs_open(uint32_t capacity); /* NULL when there is no memory */
void fx_runs_close(fx_runs *runs);
uint32_t fx_runs_free(const fx_runs *runs);

/* Take `count` integers into `taken`, ascending within each run. A free run that begins at `near` is used first (pass
 * 0xFFFFFFFF for none), then one run that holds the rest, else the largest ones. 0, or -1 when fewer are free. */
int fx_runs_take(fx_runs *runs, uint32_t count, uint32_t near, uint32_t *taken);

/* Take up to `count` neighbours, as much of them as one run has: how many, `*start` is the first; 0 when none is free. */
uint32_t fx_runs_take_run(fx_runs *runs, uint32_t count, uint32_t near, uint32_t *start);

/* Give integers back. 0, or -1 at the first that is free already or out of range (those before it are given). */
int fx_runs_give(fx_runs *runs, const uint32_t *given, uint32_t count);
int fx_runs_give_run(fx_runs *runs, uint32_t start, uint32_t count);

/* Say that `at` will soon be given. */
void fx_runs_prefetch(const fx_runs *runs, uint32_t at);

/* Take exactly these. 0, or -1 and nothing done when one is not free or appears twice. Costs a pass over capacity / 64
 * words: meant for restoring. */
int fx_runs_reserve(fx_runs *runs, const uint32_t *wanted, uint32_t count);

/* NULL, or what is wrong (a full scan). */
const char *fx_runs_check(const fx_runs *runs);
#endif
