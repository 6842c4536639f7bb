#include "slots.h"

/* The differences are or-ed instead of tested one by one: the loop stays free of branches and vectorises. */
#define SLOTS_TO_BLOCKS(type)                                                                   \
  for (uint32_t i = 0; i < n; i++) {                                                            \
    const type *row = (const type *)slots + (uint64_t)i * tokens;                               \
    const type first = row[0];                                                                  \
    type wrong = 0;                                                                             \
    for (uint32_t k = 1; k < tokens; k++) wrong |= (type)(row[k] ^ (first + (type)k));          \
    const uint64_t block = (uint64_t)first / tokens;                                            \
    if (wrong || first < 0 || block >= limit || (uint64_t)first != block * tokens) return i;    \
    blocks[i] = (uint32_t)block;                                                                \
  }

uint32_t fx_slots_to_blocks(const void *slots, int wide, uint32_t n, uint32_t tokens, uint64_t limit,
                            uint32_t *blocks) {
  if (wide) {
    SLOTS_TO_BLOCKS(int64_t)
  } else {
    SLOTS_TO_BLOCKS(int32_t)
  }
  return n;
}
