/* runs: an allocator of small integers that keeps neighbours together. */
#ifndef FX_RUNS_H
#define FX_RUNS_H
#include <stdint.h>
#endif
