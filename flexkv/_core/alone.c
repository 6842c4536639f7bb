/* Blocks that stand alone: roots without children, readable without what came before. See index.h for the contract. */
#include "index_impl.h"

/* Entries that were made together are neighbours: look there before the table. */
static inline uint32_t alone(const fx_index *index, fx_key key, uint32_t guess) {
  if (guess < index->max_blocks && fx_same(index->keys[guess], key) && fx_alive(index, guess)) return guess;
  return fx_child(index, FX_NONE, key);
}

void fx_index_find_alone(const fx_index *index, const uint64_t *words, uint32_t n, uint32_t *blocks) {
  const fx_key *keys = (const fx_key *)words;
  for (uint32_t i = 0; i < n; i++) blocks[i] = alone(index, keys[i], i ? blocks[i - 1] + 1 : FX_NONE);
}

int fx_index_insert_alone(fx_index *index, const uint64_t *words, uint32_t n, uint32_t *blocks) {
  const fx_key *keys = (const fx_key *)words;
  for (uint32_t i = 0; i < n; i++)
    if (fx_child(index, FX_NONE, keys[i]) != FX_NONE) return FX_INDEX_KNOWN;
  if (fx_runs_take(index->runs, n, FX_NONE, blocks)) return FX_INDEX_FULL;
  for (uint32_t i = 0; i < n; i++) fx_entry_add(index, blocks[i], keys[i], FX_NONE);
  return 0;
}

uint32_t fx_index_window(const fx_index *index, const uint64_t *words, uint32_t n, uint32_t first, uint32_t window,
                         uint32_t *blocks) {
  const fx_key *keys = (const fx_key *)words;
  uint32_t end = n, block = FX_NONE;
  for (uint32_t i = n; i > first && end - i < window; i--) {
    block = alone(index, keys[i - 1], block - 1);
    if (block != FX_NONE && index->masks[block].ready)
      blocks[i - 1] = block;
    else
      end = i - 1;
  }
  return end;
}
