#include "slots.h"

/* One block: the differences are or-ed instead of tested one by one, so the loop stays free of branches; it is
 * inlined with constant `tokens` for the usual block sizes, which lets the compiler unroll and vectorise it. */
#define BLOCK_OF(type)                                                                                     \
  static inline __attribute__((always_inline)) int block_of_##type(const type *row, uint32_t tokens,       \
                                                                   uint64_t limit, uint32_t *block) {      \
    const type first = row[0];                                                                             \
    type wrong = 0;                                                                                        \
    for (uint32_t k = 0; k < tokens; k++) wrong |= (type)(row[k] - (type)k) ^ first;                       \
    const uint64_t number = (uint64_t)first / tokens;                                                      \
    *block = (uint32_t)number;                                                                             \
    return wrong == 0 && first >= 0 && number < limit && (uint64_t)first == number * tokens;               \
  }                                                                                                        \
  static inline __attribute__((always_inline)) uint32_t blocks_of_##type(                                  \
      const type *slots, uint32_t n, uint32_t tokens, uint64_t limit, uint32_t *blocks) {                  \
    for (uint32_t i = 0; i < n; i++)                                                                       \
      if (!block_of_##type(slots + (uint64_t)i * tokens, tokens, limit, blocks + i)) return i;             \
    return n;                                                                                              \
  }                                                                                                        \
  static uint32_t all_##type(const type *slots, uint32_t n, uint32_t tokens, uint64_t limit,               \
                             uint32_t *blocks) {                                                           \
    switch (tokens) {                                                                                      \
      case 16: return blocks_of_##type(slots, n, 16, limit, blocks);                                       \
      case 32: return blocks_of_##type(slots, n, 32, limit, blocks);                                       \
      case 64: return blocks_of_##type(slots, n, 64, limit, blocks);                                       \
      default: return blocks_of_##type(slots, n, tokens, limit, blocks);                                   \
    }                                                                                                      \
  }

BLOCK_OF(int32_t)
BLOCK_OF(int64_t)

uint32_t fx_slots_to_blocks(const void *slots, int wide, uint32_t n, uint32_t tokens, uint64_t limit,
                            uint32_t *blocks) {
  return wide ? all_int64_t(slots, n, tokens, limit, blocks) : all_int32_t(slots, n, tokens, limit, blocks);
}
