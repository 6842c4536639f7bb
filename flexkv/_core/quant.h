/* quant: blocks of KV in 8 or 4 bits per value, each group of values with a scale of its own (and, where it pays, a
 * zero point). A section of the encoded block, per layer and part:
 *
 *   int16 top | uint8 scale[groups] | int8 zero[groups] (asymmetric only) | codes, token by token, head by head
 *
 * Steps lie on a grid of 16 per octave: step = 2^((top - 255 + scale) / 16), scale 0 is the step 0. They are rounded
 * up to it (by 4.4 % at most), so nothing is cut off. value = (code + zero) * step; 8-bit codes are int8 with 127 the
 * largest, symmetric 4-bit codes are stored + 8, asymmetric ones as they are, two to a byte: the first half of a
 * head's row in the low nibbles, the second in the high ones. */
#ifndef FX_QUANT_H
#define FX_QUANT_H
#include <stdint.h>

/* One part (K, V, or a latent) of one layer, in the decoded and in the encoded block; all strides in bytes. */
typedef struct {
  uint32_t tokens, heads, size; /* size: elements of a head, side by side */
  uint32_t token_stride, head_stride;
  uint32_t group;      /* values per group: tokens of a channel (over_tokens), else channels of a token */
  uint8_t over_tokens; /* 1: a group is one channel over tokens (K), 0: neighbouring channels of one token (V) */
  uint8_t asymmetric;  /* with zero points; 4 bits only */
  uint8_t bits;        /* 8 or 4 */
  uint8_t dtype;       /* 0 bfloat16, 1 float16, 2 float32 */
  uint64_t offset;     /* of the part inside the decoded block */
  uint64_t section;    /* of its section inside the encoded block */
} fx_quant_part;

/* Bytes of a part's section; 0 when the part cannot be encoded. */
uint64_t fx_quant_bytes(const fx_quant_part *part);

/* Encode or decode n blocks, row by row, now and in this thread. NaNs and infinities are taken for the largest value
 * of their sign. Encoding returns 0 or -ENOMEM. `portable` 1: without the CPU's vector extensions (for tests). */
int fx_quant_encode(const fx_quant_part *parts, uint32_t n_parts, const uint8_t *source, uint64_t source_stride,
                    uint8_t *target, uint64_t target_stride, uint32_t n, int portable);
void fx_quant_decode(const fx_quant_part *parts, uint32_t n_parts, const uint8_t *source, uint64_t source_stride,
                     uint8_t *target, uint64_t target_stride, uint32_t n, int portable);
#endif
