/* sum: XXH3-64 compiled for AVX2. For copy.c only, which falls back to the portable build of the same hash. */
#ifndef FX_SUM_H
#define FX_SUM_H
#include <stddef.h>
#include <stdint.h>

int fx_sum_usable(void); /* 1 when it was built for this kind of CPU and the CPU has AVX2 */
uint64_t fx_sum_avx2(const void *data, size_t size, uint64_t seed);
#endif
