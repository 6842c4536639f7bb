/* hash: chained 128-bit block keys. */
#ifndef FX_HASH_H
#define FX_HASH_H
#include <stdint.h>
#endif
