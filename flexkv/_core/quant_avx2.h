/* What compilers do not find by themselves: with AVX2 and F16C, eight values at a time, from codes to the bytes of the
 * block without a stop in memory. Operation by operation what the portable kernels compute: the same bytes. */
#ifndef FX_QUANT_AVX2_H
#define FX_QUANT_AVX2_H
#include <immintrin.h>

#define FX_AVX2 __attribute__((target("avx2,f16c")))
#define FX_INSIDE static inline __attribute__((target("avx2,f16c"), always_inline))

enum { FX_BYTES, FX_LOW, FX_HIGH }; /* where a code lies: a byte, or the nibbles of one */

/* fx_step of eight codes. */
FX_INSIDE __m256 fx_steps8(int32_t top, const uint8_t *codes) {
  __m256i low = _mm256_loadu_si256((const __m256i *)fx_mantissas);
  __m256i high = _mm256_loadu_si256((const __m256i *)(fx_mantissas + 8));
  __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes));
  __m256i k = _mm256_add_epi32(code, _mm256_set1_epi32(top - 255));
  k = _mm256_min_epi32(_mm256_max_epi32(k, _mm256_set1_epi32(-1600)), _mm256_set1_epi32(2031));
  __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_srai_epi32(k, 4), _mm256_set1_epi32(127)), 23);
  __m256 first = _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(low, k)); /* by the last three bits */
  __m256 second = _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(high, k));
  __m256 mantissa = _mm256_blendv_ps(first, second, _mm256_castsi256_ps(_mm256_slli_epi32(k, 28)));
  __m256 step = _mm256_or_ps(_mm256_castsi256_ps(exponent), mantissa);
  return _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(code, _mm256_setzero_si256())), step);
}

FX_INSIDE __m128i fx_at_most(__m128i halves, int16_t magnitude) {
  __m128i sign = _mm_and_si128(halves, _mm_set1_epi16(INT16_MIN));
  __m128i rest = _mm_and_si128(halves, _mm_set1_epi16(INT16_MAX));
  return _mm_or_si128(_mm_min_epu16(rest, _mm_set1_epi16(magnitude)), sign);
}

FX_INSIDE void fx_store8(__m256 values, uint32_t dtype, uint8_t *target) {
  __m256i bits = _mm256_castps_si256(values);
  if (dtype == FX_FP16) {
    __m128i halves = _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128((__m128i *)target, fx_at_most(halves, 0x7BFF));
  } else if (dtype == FX_BF16) {
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    bits = _mm256_srli_epi32(bits, 16);
    __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    _mm_storeu_si128((__m128i *)target, fx_at_most(halves, 0x7F7F));
  } else {
    __m256i sign = _mm256_and_si256(bits, _mm256_set1_epi32(INT32_MIN));
    __m256i rest = _mm256_and_si256(bits, _mm256_set1_epi32(INT32_MAX));
    rest = _mm256_min_epu32(rest, _mm256_set1_epi32(FX_MAX_BITS));
    _mm256_storeu_si256((__m256i *)target, _mm256_or_si256(rest, sign));
  }
}

/* Eight halves as floats; NaNs and infinities are taken for the largest value of their sign. */
FX_INSIDE void fx_load8_fp16(const uint8_t *halves, float *values) {
  __m128i finite = fx_at_most(_mm_loadu_si128((const __m128i *)halves), 0x7BFF);
  _mm256_storeu_ps(values, _mm256_cvtph_ps(finite));
}

/* Eight codes from `codes` on, as integers. */
FX_INSIDE __m256i fx_codes8(const uint8_t *codes, int place) {
  __m128i bytes = _mm_loadl_epi64((const __m128i *)codes);
  if (place == FX_BYTES) return _mm256_cvtepi8_epi32(bytes);
  __m256i wide = _mm256_cvtepu8_epi32(bytes);
  return place == FX_LOW ? _mm256_and_si256(wide, _mm256_set1_epi32(15)) : _mm256_srli_epi32(wide, 4);
}

FX_INSIDE void fx_values8(const uint8_t *codes, int place, const float *step, const int32_t *zero, uint32_t dtype,
                          uint8_t *target) {
  __m256i code = fx_codes8(codes, place);
  if (place != FX_BYTES) code = _mm256_add_epi32(code, _mm256_loadu_si256((const __m256i *)zero));
  fx_store8(_mm256_mul_ps(_mm256_cvtepi32_ps(code), _mm256_loadu_ps(step)), dtype, target);
}

/* `n` values; those that are left by eight pass through buffers. */
FX_INSIDE void fx_values(const uint8_t *codes, int place, const float *step, const int32_t *zero, uint32_t n,
                         uint32_t dtype, uint8_t *target) {
  uint32_t size = dtype == FX_FP32 ? 4 : 2, i = 0;
  for (; i + 8 <= n; i += 8)
    fx_values8(codes + i, place, step + i, zero ? zero + i : NULL, dtype, target + (size_t)i * size);
  uint32_t left = n - i;
  if (!left) return;
  uint8_t last_codes[8] = {0}, last[32];
  float last_step[8] = {0};
  int32_t last_zero[8] = {0};
  memcpy(last_codes, codes + i, left);
  memcpy(last_step, step + i, left * sizeof *step);
  if (zero) memcpy(last_zero, zero + i, left * sizeof *zero);
  fx_values8(last_codes, place, last_step, last_zero, dtype, last);
  memcpy(target + (size_t)i * size, last, (size_t)left * size);
}

/* A row of codes into the bytes of its values; codes of 8 bits have no zero points. */
FX_INSIDE void fx_row(const uint8_t *codes, const float *step, const int32_t *zero, const fx_quant_part *part,
                      uint32_t dtype, uint8_t *target) {
  if (part->bits == 8) {
    fx_values(codes, FX_BYTES, step, NULL, part->size, dtype, target);
    return;
  }
  uint32_t half = (part->size + 1) / 2, size = dtype == FX_FP32 ? 4 : 2;
  fx_values(codes, FX_LOW, step, zero, half, dtype, target);
  fx_values(codes, FX_HIGH, step + half, zero + half, part->size - half, dtype, target + (size_t)half * size);
}

static FX_AVX2 void decode_row_avx2(const uint8_t *codes, const float *step, const int32_t *zero, const fx_quant_part *part,
                                uint8_t *target) {
  if (part->dtype == FX_BF16)
    fx_row(codes, step, zero, part, FX_BF16, target);
  else if (part->dtype == FX_FP16)
    fx_row(codes, step, zero, part, FX_FP16, target);
  else
    fx_row(codes, step, zero, part, FX_FP32, target);
}
#endif
