/* slots: an engine's token slots -> device blocks. */
#ifndef FX_SLOTS_H
#define FX_SLOTS_H
#include <stdint.h>

/* blocks[i] = slots[i * tokens] / tokens for n blocks of `tokens` consecutive, block-aligned slots below `limit`.
 * Returns n, or the index of the first block that is not so. `wide`: 1 for int64 slots, 0 for int32. */
uint32_t fx_slots_to_blocks(const void *slots, int wide, uint32_t n, uint32_t tokens, uint64_t limit, uint32_t *blocks);
#endif
