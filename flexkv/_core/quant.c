/* quant: group quantisation of KV blocks; the kernels are in quant_impl.h. */
#include "quant.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { FX_BF16, FX_FP16, FX_FP32 };

#define FX_ROW_MAX 1024u        /* elements of a head: buffers of a row are on the stack */
#define FX_MAX_BITS 0x7F7FFFFFu /* the largest finite float */
#define FX_LEAST 0x1p-100f      /* smaller steps are as good as this one, and it has an inverse */
#define FX_NO_STEP (-32768)
#define FX_ROUNDER 12582912.0f /* 1.5 * 2^23: what is added to it is rounded to an integer, to even */
#define FX_ROUNDER_BITS 0x4B400000u

typedef union {
  float value;
  uint32_t bits;
} fx_both;

typedef uint16_t __attribute__((aligned(1), may_alias)) fx_half;
typedef uint32_t __attribute__((aligned(1), may_alias)) fx_word;

/* The mantissas of 2^(j/16). */
static const uint32_t fx_mantissas[16] = {0x000000, 0x05AAC3, 0x0B95C2, 0x11C3D3, 0x1837F0, 0x1EF532,
                                          0x25FED7, 0x2D583F, 0x3504F3, 0x3D08A4, 0x45672A, 0x4E248C,
                                          0x5744FD, 0x60CCDF, 0x6AC0C7, 0x75257D};

/* What encoding notes of a part before it knows `top`: the same for every part, and as large as the largest needs. */
typedef struct {
  float *needs, *least, *most;
  int16_t *steps;
} fx_quant_scratch;

typedef struct {
  uint8_t *top, *scales, *codes;
  int8_t *zeros;
  uint32_t groups, groups_per_row, scale_rows; /* scale_rows: rows of the encoder that share their scales */
  uint32_t row_bytes;
} fx_section;

typedef struct {
  uint32_t token, tokens, head;
} fx_range;

/* A section's numbers, without its places. */
static fx_section fx_counts_of(const fx_quant_part *part) {
  fx_section section = {0};
  uint32_t groups_along = part->over_tokens ? part->tokens : part->size;
  groups_along = (groups_along + part->group - 1) / part->group;
  section.groups_per_row = part->over_tokens ? part->size : groups_along;
  section.scale_rows = (part->over_tokens ? groups_along : part->tokens) * part->heads;
  section.groups = section.scale_rows * section.groups_per_row;
  section.row_bytes = part->bits == 8 ? part->size : (part->size + 1) / 2;
  return section;
}

static fx_section fx_section_of(const fx_quant_part *part, uint8_t *place) {
  fx_section section = fx_counts_of(part);
  section.top = place;
  section.scales = place + sizeof(int16_t);
  section.zeros = (int8_t *)section.scales + section.groups;
  section.codes = (uint8_t *)section.zeros + (part->asymmetric ? section.groups : 0);
  return section;
}

/* The tokens and the head that share scale row `row`. */
static inline fx_range fx_rows_of(const fx_quant_part *part, uint32_t row) {
  fx_range range = {row / part->heads, 1, row % part->heads};
  if (part->over_tokens) {
    range.token *= part->group;
    range.tokens = part->tokens - range.token < part->group ? part->tokens - range.token : part->group;
  }
  return range;
}

static inline float fx_step(int32_t top, uint32_t code) {
  int32_t k = top - 255 + (int32_t)code;
  k = k < -1600 ? -1600 : k > 2031 ? 2031 : k; /* bytes that no encoder wrote may say anything */
  fx_both step = {.bits = ((uint32_t)((k >> 4) + 127) << 23) | fx_mantissas[k & 15]};
  return code ? step.value : 0;
}

/* value / step, as `put` rounds it; 0 for the step 0. */
static inline int32_t fx_rounded(float value, float step) {
  float inverse = step > 0 ? 1.0f / step : 0;
  fx_both scaled = {.value = value * inverse + FX_ROUNDER};
  return (int32_t)(scaled.bits - FX_ROUNDER_BITS);
}

/* Pick `top` of a part, and the codes of its steps; those far below it get the least step there is. */
static int32_t fx_choose_codes(const int16_t *steps, uint32_t groups, uint8_t *codes) {
  int32_t top = FX_NO_STEP;
  for (uint32_t i = 0; i < groups; i++) top = steps[i] > top ? steps[i] : top;
  for (uint32_t i = 0; i < groups; i++) {
    int32_t code = steps[i] - top + 255;
    code = code < 1 ? 1 : code;
    codes[i] = (uint8_t)(steps[i] == FX_NO_STEP ? 0 : code);
  }
  return top == FX_NO_STEP ? 0 : top;
}

#define FX_TARGET
#define FX_NAME(name) name##_portable
#include "quant_impl.h"
#undef FX_NAME
#undef FX_TARGET

#if defined(__x86_64__) && defined(__GNUC__)
#include "quant_avx2.h"
#define FX_TARGET FX_AVX2
#define FX_NAME(name) name##_avx2
#include "quant_impl.h"
#undef FX_NAME
#undef FX_TARGET
#undef FX_AVX2
static int has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }
#else
#define encode_block_avx2 encode_block_portable
#define decode_block_avx2 decode_block_portable
static int has_avx2(void) { return 0; }
#endif

uint64_t fx_quant_bytes(const fx_quant_part *part) {
  if (!part->tokens || !part->heads || !part->size || part->size > FX_ROW_MAX || !part->group) return 0;
  if ((part->bits != 8 && part->bits != 4) || part->dtype > FX_FP32) return 0;
  if (part->asymmetric && part->bits != 4) return 0;
  fx_section section = fx_counts_of(part);
  uint64_t scales = (uint64_t)section.groups * (part->asymmetric ? 2 : 1);
  return sizeof(int16_t) + scales + (uint64_t)part->tokens * part->heads * section.row_bytes;
}

int fx_quant_encode(const fx_quant_part *parts, uint32_t n_parts, const uint8_t *source, uint64_t source_stride,
                    uint8_t *target, uint64_t target_stride, uint32_t n, int portable) {
  size_t groups = 1;
  for (uint32_t i = 0; i < n_parts; i++) {
    uint32_t needed = fx_counts_of(&parts[i]).groups;
    groups = needed > groups ? needed : groups;
  }
  float *memory = malloc(groups * (3 * sizeof(float) + sizeof(int16_t)));
  if (!memory) return -ENOMEM;
  fx_quant_scratch scratch = {memory, memory + groups, memory + 2 * groups, (int16_t *)(memory + 3 * groups)};
  int fast = !portable && has_avx2();
  for (uint32_t i = 0; i < n; i++, source += source_stride, target += target_stride)
    (fast ? encode_block_avx2 : encode_block_portable)(parts, n_parts, source, target, &scratch);
  free(memory);
  return 0;
}

void fx_quant_decode(const fx_quant_part *parts, uint32_t n_parts, const uint8_t *source, uint64_t source_stride,
                     uint8_t *target, uint64_t target_stride, uint32_t n, int portable) {
  int fast = !portable && has_avx2();
  for (uint32_t i = 0; i < n; i++, source += source_stride, target += target_stride)
    (fast ? decode_block_avx2 : decode_block_portable)(parts, n_parts, source, target);
}
