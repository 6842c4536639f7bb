/* The kernels of quant.c: plain loops that compilers vectorise. Included once per instruction set, with FX_NAME (what
 * a function is called) and FX_TARGET (its attribute) set. No operation is fused with another, so that every
 * instruction set gives the same bytes. */

/* Values of at most 65504: NaNs and infinities are taken for it. */
static FX_TARGET void FX_NAME(load_fp16)(const uint8_t *source, uint32_t n, float *restrict values) {
  const fx_half *from = (const fx_half *)source;
  uint32_t i = 0;
#ifdef FX_AVX2
  for (; i + 8 <= n; i += 8) fx_load8_fp16(source + 2 * i, values + i);
#endif
  for (; i < n; i++) {
    uint32_t magnitude = from[i] & 0x7FFFu;
    magnitude = magnitude < 0x7BFFu ? magnitude : 0x7BFFu;
    fx_both wide = {.bits = magnitude << 13};
    wide.value *= 0x1p112f; /* the exponents differ in their bias; right for subnormals, too */
    wide.bits |= (uint32_t)(from[i] & 0x8000u) << 16;
    values[i] = wide.value;
  }
}

static FX_TARGET void FX_NAME(load)(const uint8_t *source, uint32_t dtype, uint32_t n, float *restrict values) {
  uint32_t bits[FX_ROW_MAX];
  if (dtype == FX_FP16) {
    FX_NAME(load_fp16)(source, n, values);
    return;
  }
  if (dtype == FX_BF16) {
    const fx_half *from = (const fx_half *)source;
    for (uint32_t i = 0; i < n; i++) bits[i] = (uint32_t)from[i] << 16;
  } else {
    memcpy(bits, source, n * sizeof(float));
  }
  for (uint32_t i = 0; i < n; i++) {
    uint32_t magnitude = bits[i] & 0x7FFFFFFFu;
    fx_both value = {.bits = magnitude < FX_MAX_BITS ? magnitude : FX_MAX_BITS};
    value.bits |= bits[i] & 0x80000000u;
    values[i] = value.value;
  }
}

/* The least k with 2^(k/16) >= value, for each of n values; FX_NO_STEP for 0. */
static FX_TARGET void FX_NAME(steps)(const float *restrict values, uint32_t n, int16_t *restrict steps) {
  for (uint32_t i = 0; i < n; i++) {
    fx_both value = {.value = values[i] > FX_LEAST ? values[i] : FX_LEAST};
    int32_t mantissa = (int32_t)(value.bits & 0x7FFFFFu), above = 0;
    for (int j = 0; j < 16; j++) above += mantissa > (int32_t)fx_mantissas[j];
    int32_t step = 16 * ((int32_t)(value.bits >> 23) - 127) + above;
    steps[i] = (int16_t)(values[i] > 0 ? step : FX_NO_STEP);
  }
}

/* A row of a head into codes: code = value * inverse, rounded to even, - zero. */
static FX_TARGET void FX_NAME(put)(const float *restrict values, const float *restrict inverse,
                                   const int32_t *restrict zero, const fx_quant_part *part, uint8_t *restrict row) {
  int32_t codes[FX_ROW_MAX + 1];
  int32_t least = part->bits == 8 ? -127 : part->asymmetric ? 0 : 1;
  int32_t most = part->bits == 8 ? 127 : 15;
  for (uint32_t i = 0; i < part->size; i++) {
    fx_both scaled = {.value = values[i] * inverse[i] + FX_ROUNDER};
    int32_t code = (int32_t)(scaled.bits - FX_ROUNDER_BITS) - zero[i];
    code = code < least ? least : code;
    codes[i] = code > most ? most : code;
  }
  if (part->bits == 8) {
    for (uint32_t i = 0; i < part->size; i++) row[i] = (uint8_t)codes[i];
    return;
  }
  uint32_t half = (part->size + 1) / 2;
  codes[part->size] = 0; /* what an odd row has no value for */
  for (uint32_t i = 0; i < half; i++) row[i] = (uint8_t)(codes[i] | codes[half + i] << 4);
}

/* What the steps of `n` groups must be at least, given their least and largest values. */
static FX_TARGET void FX_NAME(need)(const fx_quant_part *part, const float *restrict least, const float *restrict most,
                                    uint32_t n, float *restrict needs) {
  float largest = 1.0f / (part->bits == 8 || part->asymmetric ? 127 : 7); /* code, or zero point */
  for (uint32_t i = 0; i < n; i++) {
    float magnitude = -least[i] > most[i] ? -least[i] : most[i];
    needs[i] = magnitude * largest;
  }
  if (!part->asymmetric) return;
  for (uint32_t i = 0; i < n; i++) { /* a little more than 1/15: both ends, rounded, are at most 15 apart */
    float span = most[i] * 0.0666668f - least[i] * 0.0666668f;
    needs[i] = span > needs[i] ? span : needs[i];
  }
}

static FX_TARGET void FX_NAME(look_over_tokens)(const fx_quant_part *part, const uint8_t *rows, uint32_t tokens,
                                                float *restrict least, float *restrict most) {
  float values[FX_ROW_MAX];
  for (uint32_t token = 0; token < tokens; token++) {
    FX_NAME(load)(rows + (size_t)token * part->token_stride, part->dtype, part->size, values);
    if (!token) {
      memcpy(least, values, part->size * sizeof(float));
      memcpy(most, values, part->size * sizeof(float));
    }
    for (uint32_t i = 0; i < part->size; i++) least[i] = values[i] < least[i] ? values[i] : least[i];
    for (uint32_t i = 0; i < part->size; i++) most[i] = values[i] > most[i] ? values[i] : most[i];
  }
}

/* Integers in the order of the floats, and back: the least and largest of those are found side by side. */
static inline FX_TARGET int32_t FX_NAME(ordered)(int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }

static FX_TARGET void FX_NAME(look_over_channels)(const fx_quant_part *part, const uint8_t *row, float *least,
                                                  float *most) {
  float values[FX_ROW_MAX];
  FX_NAME(load)(row, part->dtype, part->size, values);
  for (uint32_t first = 0; first < part->size; first += part->group, least++, most++) {
    uint32_t end = first + part->group < part->size ? first + part->group : part->size;
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (uint32_t i = first; i < end; i++) {
      fx_both value = {.value = values[i]};
      int32_t order = FX_NAME(ordered)((int32_t)value.bits);
      low = order < low ? order : low;
      high = order > high ? order : high;
    }
    fx_both found = {.bits = (uint32_t)FX_NAME(ordered)(low)};
    *least = found.value;
    found.bits = (uint32_t)FX_NAME(ordered)(high);
    *most = found.value;
  }
}

/* Steps of all groups of a row, from their codes on the grid below `top`; and what a code is counted from, unless `zero`
 * is NULL. */
static FX_TARGET void FX_NAME(fill)(const fx_quant_part *part, int32_t top, const uint8_t *codes, const int8_t *zeros,
                                    float *restrict step, int32_t *restrict zero) {
  int32_t middle = part->bits == 4 ? -8 : 0;
  if (part->over_tokens) {
    uint32_t at = 0;
#ifdef FX_AVX2
    for (; at + 8 <= part->size; at += 8) _mm256_storeu_ps(step + at, fx_steps8(top, codes + at));
#endif
    for (; at < part->size; at++) step[at] = fx_step(top, codes[at]);
    for (uint32_t i = 0; zero && i < part->size; i++) zero[i] = part->asymmetric ? zeros[i] : middle;
    return;
  }
  for (uint32_t first = 0, group = 0; first < part->size; first += part->group, group++) {
    uint32_t end = first + part->group < part->size ? first + part->group : part->size;
    float all = fx_step(top, codes[group]);
    int32_t from = part->asymmetric ? zeros[group] : middle;
    for (uint32_t i = first; i < end; i++) step[i] = all;
    for (uint32_t i = first; zero && i < end; i++) zero[i] = from;
  }
}

static FX_TARGET void FX_NAME(encode)(const fx_quant_part *part, const uint8_t *block, uint8_t *encoded,
                                      fx_quant_scratch *scratch) {
  const uint8_t *rows = block + part->offset;
  fx_section section = fx_section_of(part, encoded + part->section);
  uint32_t per_row = section.groups_per_row, groups = section.groups;
  for (uint32_t row = 0; row < section.scale_rows; row++) {
    fx_range range = fx_rows_of(part, row);
    const uint8_t *first = rows + (size_t)range.token * part->token_stride + (size_t)range.head * part->head_stride;
    float *least = scratch->least + (size_t)row * per_row, *most = scratch->most + (size_t)row * per_row;
    if (part->over_tokens)
      FX_NAME(look_over_tokens)(part, first, range.tokens, least, most);
    else
      FX_NAME(look_over_channels)(part, first, least, most);
  }
  FX_NAME(need)(part, scratch->least, scratch->most, groups, scratch->needs);
  FX_NAME(steps)(scratch->needs, groups, scratch->steps);
  int32_t top = fx_choose_codes(scratch->steps, groups, section.scales);
  int16_t stored = (int16_t)top;
  memcpy(section.top, &stored, sizeof stored);
  float values[FX_ROW_MAX], step[FX_ROW_MAX], inverse[FX_ROW_MAX];
  int32_t zero[FX_ROW_MAX];
  for (uint32_t row = 0; row < section.scale_rows; row++) {
    size_t at = (size_t)row * per_row;
    int8_t *zeros = section.zeros + at;
    for (uint32_t i = 0; part->asymmetric && i < per_row; i++)
      zeros[i] = (int8_t)fx_rounded(scratch->least[at + i], fx_step(top, section.scales[at + i]));
    FX_NAME(fill)(part, top, section.scales + at, zeros, step, zero);
    for (uint32_t i = 0; i < part->size; i++) inverse[i] = step[i] > 0 ? 1.0f / step[i] : 0;
    fx_range range = fx_rows_of(part, row);
    for (uint32_t i = range.token; i < range.token + range.tokens; i++) {
      FX_NAME(load)(rows + (size_t)i * part->token_stride + (size_t)range.head * part->head_stride, part->dtype,
                    part->size, values);
      uint8_t *codes = section.codes + ((size_t)i * part->heads + range.head) * section.row_bytes;
      FX_NAME(put)(values, inverse, zero, part, codes);
    }
  }
}

#ifndef FX_AVX2
static FX_TARGET void FX_NAME(store)(const float *restrict values, uint32_t dtype, uint32_t n, uint8_t *target) {
  if (dtype == FX_BF16) {
    fx_half *to = (fx_half *)target;
    for (uint32_t i = 0; i < n; i++) {
      fx_both value = {.value = values[i]};
      uint32_t rounded = (value.bits + 0x7FFFu + ((value.bits >> 16) & 1u)) >> 16;
      uint32_t magnitude = rounded & 0x7FFFu;
      to[i] = (uint16_t)((rounded & 0x8000u) | (magnitude < 0x7F7Fu ? magnitude : 0x7F7Fu));
    }
  } else if (dtype == FX_FP16) {
    fx_half *to = (fx_half *)target;
    for (uint32_t i = 0; i < n; i++) {
      fx_both value = {.value = values[i]};
      uint32_t sign = (value.bits >> 16) & 0x8000u;
      value.bits &= 0x7FFFFFFFu;
      uint32_t normal = (value.bits - (112u << 23) + 0xFFFu + ((value.bits >> 13) & 1u)) >> 13;
      fx_both small = {.value = value.value + 0.5f}; /* rounds to multiples of 2^-24 */
      uint32_t half = value.bits < 113u << 23 ? small.bits - 0x3F000000u : normal;
      to[i] = (uint16_t)(sign | (half < 0x7BFFu ? half : 0x7BFFu));
    }
  } else {
    fx_word *to = (fx_word *)target;
    for (uint32_t i = 0; i < n; i++) {
      fx_both value = {.value = values[i]};
      uint32_t magnitude = value.bits & 0x7FFFFFFFu;
      to[i] = (value.bits & 0x80000000u) | (magnitude < FX_MAX_BITS ? magnitude : FX_MAX_BITS);
    }
  }
}

/* A row of codes into values = (code + zero) * step. */
static FX_TARGET void FX_NAME(get)(const uint8_t *restrict row, const float *restrict step,
                                   const int32_t *restrict zero, const fx_quant_part *part, float *restrict values) {
  if (part->bits == 8) {
    for (uint32_t i = 0; i < part->size; i++) values[i] = (float)(int8_t)row[i] * step[i];
    return;
  }
  uint32_t half = (part->size + 1) / 2;
  for (uint32_t i = 0; i < half; i++) values[i] = (float)((row[i] & 15) + zero[i]) * step[i];
  for (uint32_t i = half; i < part->size; i++) values[i] = (float)((row[i - half] >> 4) + zero[i]) * step[i];
}

static FX_TARGET void FX_NAME(decode_row)(const uint8_t *codes, const float *step, const int32_t *zero,
                                          const fx_quant_part *part, uint8_t *target) {
  float values[FX_ROW_MAX];
  FX_NAME(get)(codes, step, zero, part, values);
  FX_NAME(store)(values, part->dtype, part->size, target);
}
#endif

static FX_TARGET void FX_NAME(decode)(const fx_quant_part *part, const uint8_t *encoded, uint8_t *block) {
  uint8_t *rows = block + part->offset;
  fx_section section = fx_section_of(part, (uint8_t *)(uintptr_t)encoded + part->section);
  int16_t top;
  memcpy(&top, section.top, sizeof top);
  float step[FX_ROW_MAX];
  int32_t zeros[FX_ROW_MAX], *zero = part->bits == 4 ? zeros : NULL;
  for (uint32_t row = 0; row < section.scale_rows; row++) {
    size_t at = (size_t)row * section.groups_per_row;
    FX_NAME(fill)(part, top, section.scales + at, section.zeros + at, step, zero);
    fx_range range = fx_rows_of(part, row);
    for (uint32_t i = range.token; i < range.token + range.tokens; i++) {
      const uint8_t *codes = section.codes + ((size_t)i * part->heads + range.head) * section.row_bytes;
      FX_NAME(decode_row)(codes, step, zero, part,
                          rows + (size_t)i * part->token_stride + (size_t)range.head * part->head_stride);
    }
  }
}

static FX_TARGET void FX_NAME(encode_block)(const fx_quant_part *parts, uint32_t n_parts, const uint8_t *source,
                                            uint8_t *target, fx_quant_scratch *scratch) {
  for (uint32_t i = 0; i < n_parts; i++) FX_NAME(encode)(&parts[i], source, target, scratch);
}

static FX_TARGET void FX_NAME(decode_block)(const fx_quant_part *parts, uint32_t n_parts, const uint8_t *source,
                                            uint8_t *target) {
  for (uint32_t i = 0; i < n_parts; i++) FX_NAME(decode)(&parts[i], source, target);
}
