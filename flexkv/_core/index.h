/* index: the prefix index, a hash table of chained keys with parent links, per-tier residency and leaf orders. */
#ifndef FX_INDEX_H
#define FX_INDEX_H
#include <stdint.h>
#endif
