/* Who leaves first: one 4-ary heap per tier that holds exactly the blocks the tier could evict now.
 *
 * When a victim leaves, its parent usually becomes evictable with a rank that is not larger: it takes the victim's
 * place in the heap, so a chain is evicted at O(1) per block. Blocks that are not evictable keep their rank beside. */
#include <string.h>

#include "index_impl.h"

static inline uint32_t block_of(const fx_index *index, fx_standing standing) {
  return (uint32_t)(standing.stamp & ((1ull << index->block_bits) - 1));
}

/* Rank first, then stamp: as one 128-bit number, so that comparing needs no branch. */
static inline int before(fx_standing a, fx_standing b) {
  unsigned __int128 left = (unsigned __int128)a.rank << 64 | a.stamp;
  unsigned __int128 right = (unsigned __int128)b.rank << 64 | b.stamp;
  return left < right;
}

static inline void put(fx_index *index, fx_tier *tier, uint32_t place, fx_standing standing) {
  tier->heap[place] = standing;
  tier->place[block_of(index, standing)] = place;
}

static void sift_up(fx_index *index, fx_tier *tier, uint32_t place, fx_standing standing) {
  while (place > FX_ROOT) {
    uint32_t above = place / 4 + 2;
    if (!before(standing, tier->heap[above])) break;
    put(index, tier, place, tier->heap[above]);
    place = above;
  }
  put(index, tier, place, standing);
}

static void sift_down(fx_index *index, fx_tier *tier, uint32_t place, fx_standing standing) {
  const fx_standing *heap = tier->heap;
  uint32_t end = tier->end;
  for (;;) {
    uint32_t child = 4 * (place - 2), least = child;
    if (child >= end) break;
    if (child + 4 <= end) {
      uint32_t left = child + (uint32_t)before(heap[child + 1], heap[child]);
      uint32_t right = child + 2 + (uint32_t)before(heap[child + 3], heap[child + 2]);
      least = before(heap[right], heap[left]) ? right : left;
    } else {
      for (uint32_t i = child + 1; i < end; i++)
        if (before(heap[i], heap[least])) least = i;
    }
    if (!before(heap[least], standing)) break;
    put(index, tier, place, heap[least]);
    place = least;
  }
  put(index, tier, place, standing);
}

/* Let `standing` take a place that is free now. */
static void settle_place(fx_index *index, fx_tier *tier, uint32_t place, fx_standing standing) {
  if (place > FX_ROOT && before(standing, tier->heap[place / 4 + 2]))
    sift_up(index, tier, place, standing);
  else
    sift_down(index, tier, place, standing);
}

static void heap_push(fx_index *index, fx_tier *tier, uint32_t block) {
  sift_up(index, tier, tier->end++, tier->standing[block]);
}

static void heap_remove(fx_index *index, fx_tier *tier, uint32_t place) {
  uint32_t last = --tier->end;
  if (place != last) settle_place(index, tier, place, tier->heap[last]);
}

void fx_index_settle_tier(fx_index *index, uint32_t tier, uint32_t block) {
  uint8_t bit = (uint8_t)(1u << tier);
  fx_mask *mask = &index->masks[block];
  if (!((fx_evictable(index, block) ^ mask->heaped) & bit)) return;
  mask->heaped ^= bit;
  if (mask->heaped & bit)
    heap_push(index, &index->tier[tier], block);
  else
    heap_remove(index, &index->tier[tier], index->tier[tier].place[block]);
}

void fx_index_settle(fx_index *index, uint32_t block) {
  unsigned differ = fx_evictable(index, block) ^ index->masks[block].heaped;
  for (; differ; differ &= differ - 1) fx_index_settle_tier(index, (uint32_t)__builtin_ctz(differ), block);
}

/* ---- ranks ---- */

/* Number of a rank call: the second part of the order. It has at least 34 bits and one is used per call; should it
 * ever run out, ties are broken by block number alone. */
uint64_t fx_order_call(fx_index *index, uint32_t tier) {
  uint64_t last = ~0ull >> index->block_bits;
  uint64_t call = index->tier[tier].calls;
  if (call < last) index->tier[tier].calls = ++call;
  return call;
}

/* Doubles as integers of the same order; -0.0 and 0.0 are the same rank. */
static inline uint64_t comparable(double value) {
  uint64_t bits;
  value += 0.0;
  memcpy(&bits, &value, sizeof bits);
  return bits >> 63 ? ~bits : bits | 1ull << 63;
}

static inline double rank_of(uint64_t rank) {
  double value;
  uint64_t bits = rank >> 63 ? rank & ~(1ull << 63) : ~rank;
  if (!rank) return 0.0; /* it never was in the tier */
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline void stand(fx_index *index, uint32_t tier_number, uint32_t block, fx_standing standing) {
  fx_tier *tier = &index->tier[tier_number];
  tier->standing[block] = standing;
  if (index->masks[block].heaped >> tier_number & 1) settle_place(index, tier, tier->place[block], standing);
}

void fx_order_set(fx_index *index, uint32_t tier, uint32_t block, double value, uint64_t call) {
  stand(index, tier, block, (fx_standing){call << index->block_bits | block, comparable(value)});
}

int fx_order_rank(fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, double value) {
  if (value != value) return FX_INDEX_RANK;
  uint64_t stamp = fx_order_call(index, tier) << index->block_bits, rank = comparable(value);
  for (uint32_t i = 0; i < n; i++) {
    if (!fx_alive(index, blocks[i])) return FX_INDEX_NO_BLOCK;
    stand(index, tier, blocks[i], (fx_standing){stamp | blocks[i], rank});
  }
  return 0;
}

int fx_order_rank_each(fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, const double *values) {
  uint64_t call = fx_order_call(index, tier);
  for (uint32_t i = 0; i < n; i++) {
    if (!fx_alive(index, blocks[i])) return FX_INDEX_NO_BLOCK;
    if (values[i] != values[i]) return FX_INDEX_RANK;
    fx_order_set(index, tier, blocks[i], values[i], call);
  }
  return 0;
}

int fx_order_ranks(const fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, double *values) {
  for (uint32_t i = 0; i < n; i++) {
    if (!fx_alive(index, blocks[i])) return FX_INDEX_NO_BLOCK;
    values[i] = rank_of(index->tier[tier].standing[blocks[i]].rank);
  }
  return 0;
}

/* ---- taking ---- */

/* The block leaves the tier on trial: readiness and counts change as if it had gone, entries and slots stay. */
static void release(fx_index *index, uint32_t tier_number, uint32_t block) {
  fx_tier *tier = &index->tier[tier_number];
  uint8_t keep = (uint8_t) ~(1u << tier_number);
  uint32_t parent = index->nodes[block].parent, place = tier->place[block], changed = parent;
  index->masks[block].ready &= keep;
  index->masks[block].heaped &= keep;
  if (parent != FX_NONE) {
    if (!--tier->kids[parent]) index->masks[parent].busy &= keep;
    /* An entry without anything left goes, and then maybe the ghosts above it. */
    for (uint32_t gone = block; changed != FX_NONE && fx_is_empty(index, gone); changed = index->nodes[gone].parent) {
      index->nodes[changed].children--;
      gone = changed;
      if (!fx_is_empty(index, gone)) break;
    }
    if (changed != FX_NONE && !(index->masks[changed].heaped >> tier_number & 1) &&
        (fx_evictable(index, changed) >> tier_number & 1)) {
      index->masks[changed].heaped |= (uint8_t)~keep;
      settle_place(index, tier, place, tier->standing[changed]);
      return;
    }
  }
  heap_remove(index, tier, place);
}

/* Undo the latest release. */
static void bring_back(fx_index *index, uint32_t tier_number, uint32_t block) {
  fx_tier *tier = &index->tier[tier_number];
  uint8_t bit = (uint8_t)(1u << tier_number);
  uint32_t parent = index->nodes[block].parent, changed = parent;
  if (parent != FX_NONE && fx_is_empty(index, block)) {
    while (fx_is_empty(index, changed) && index->nodes[changed].parent != FX_NONE) changed = index->nodes[changed].parent;
    for (uint32_t above = parent;; above = index->nodes[above].parent) {
      index->nodes[above].children++;
      if (above == changed) break;
    }
  }
  if (parent != FX_NONE && !tier->kids[parent]++) index->masks[parent].busy |= bit;
  index->masks[block].ready |= bit;
  index->masks[block].heaped |= bit;
  if (changed != FX_NONE && (index->masks[changed].heaped & bit) && !(fx_evictable(index, changed) & bit)) {
    index->masks[changed].heaped &= (uint8_t)~bit;
    settle_place(index, tier, tier->place[changed], tier->standing[block]);
  } else {
    heap_push(index, tier, block);
  }
}

static uint32_t take(fx_index *index, uint32_t tier, uint32_t count) {
  uint32_t taken = 0;
  for (; taken < count && index->tier[tier].end > FX_ROOT; taken++) {
    uint32_t block = block_of(index, index->tier[tier].heap[FX_ROOT]);
    release(index, tier, block);
    index->trial[index->trials++] = block;
  }
  return taken;
}

int64_t fx_order_take(fx_index *index, uint32_t tier, uint32_t count, uint32_t *blocks) {
  uint32_t mark = index->trials, taken = take(index, tier, count);
  memcpy(blocks, index->trial + mark, taken * sizeof *blocks);
  while (index->trials > mark) bring_back(index, tier, index->trial[--index->trials]);
  return taken;
}

int64_t fx_trial_accept(fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, uint32_t count,
                        uint32_t *accepted) {
  uint32_t taken = 0;
  for (uint32_t i = 0; i < n && taken < count; i++) {
    if (blocks[i] >= index->max_blocks) return FX_INDEX_NO_BLOCK;
    if (!(index->masks[blocks[i]].heaped >> tier & 1)) continue;
    release(index, tier, blocks[i]);
    index->trial[index->trials++] = accepted[taken++] = blocks[i];
  }
  return taken;
}

void fx_trial_end(fx_index *index, uint32_t tier) {
  while (index->trials) bring_back(index, tier, index->trial[--index->trials]);
}

/* The victim's entry goes if nothing is left, then the ghosts above it; the other tiers' orders learn of it. Child
 * counts were brought down by release. */
static void commit(fx_index *index, uint32_t block) {
  while (fx_alive(index, block)) {
    uint32_t parent = index->nodes[block].parent;
    int gone = fx_is_empty(index, block);
    if (gone)
      fx_entry_free(index, block);
    else
      fx_index_settle(index, block);
    if (parent == FX_NONE || !gone) break;
    block = parent;
  }
}

uint32_t fx_index_evict(fx_index *index, uint32_t tier, uint32_t count, uint32_t *blocks, uint32_t *slots) {
  uint32_t taken = take(index, tier, count);
  memcpy(blocks, index->trial, taken * sizeof *blocks);
  index->trials = 0;
  index->tier[tier].resident -= taken;
  for (uint32_t i = 0; i < taken; i++) {
    slots[i] = index->tier[tier].slot[blocks[i]];
    if (i < FX_AHEAD) fx_prefetch_cell(index, index->keys[blocks[i]]);
  }
  for (uint32_t i = 0; i < taken; i++) {
    if (i + FX_AHEAD < taken) fx_prefetch_cell(index, index->keys[blocks[i + FX_AHEAD]]);
    commit(index, blocks[i]);
  }
  fx_give_loose(index);
  return taken;
}

int fx_index_evictable(const fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, uint8_t *mask) {
  for (uint32_t i = 0; i < n; i++) {
    if (blocks[i] >= index->max_blocks) return FX_INDEX_NO_BLOCK;
    mask[i] = index->masks[blocks[i]].heaped >> tier & 1;
  }
  return 0;
}
