/* sum: XXH3-64 compiled for AVX2, in a file of its own because the whole header must be compiled for it.
 *
 * Against the portable (SSE2) build: 1.3x on blocks of 64 KiB to 2 MiB in cold memory, 1.7x when they are cached,
 * as after direct I/O (a Xeon of 2023). The longer prefetch distance is half of the former. */
#include "sum.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx2")
#define XXH_PREFETCH_DIST 1024
#include <xxhash.h>

int fx_sum_usable(void) { return __builtin_cpu_supports("avx2") != 0; }
uint64_t fx_sum_avx2(const void *data, size_t size, uint64_t seed) { return XXH3_64bits_withSeed(data, size, seed); }
void fx_sum_more_avx2(void *state, const void *data, size_t size) { XXH3_64bits_update(state, data, size); }
#else
int fx_sum_usable(void) { return 0; }
uint64_t fx_sum_avx2(const void *data, size_t size, uint64_t seed) {
  (void)data, (void)size;
  return seed; /* never called */
}
void fx_sum_more_avx2(void *state, const void *data, size_t size) { (void)state, (void)data, (void)size; }
#endif
