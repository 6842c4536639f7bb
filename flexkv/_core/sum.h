/* sum: XXH3-64, compiled for AVX2 where that is there, at once or piece by piece; seeds from keys. */
#ifndef FX_SUM_H
#define FX_SUM_H
#include <stddef.h>
#include <stdint.h>

int fx_sum_usable(void); /* 1 when it was built for this kind of CPU and the CPU has AVX2 */
uint64_t fx_sum_avx2(const void *data, size_t size, uint64_t seed); /* only where it is usable */

/* The same of data that comes in pieces. `state` is fx_sum_state_bytes() of memory at a multiple of 64. */
size_t fx_sum_state_bytes(void);
void fx_sum_begin(void *state, uint64_t seed);
void fx_sum_more_avx2(void *state, const void *data, size_t size); /* only where it is usable */
void fx_sum_more(void *state, const void *data, size_t size);
uint64_t fx_sum_end(void *state);

/* The seed of a block's checksum. Both words must matter, and (a, b) must not meet (b, a): multiply one by an odd
 * constant before mixing. */
static inline uint64_t fx_sum_seed(const uint64_t key[2]) {
  uint64_t mixed = key[0] ^ (key[1] * 0x9E3779B97F4A7C15u);
  return mixed ^ (mixed >> 32) ^ (key[1] << 1);
}
#endif
