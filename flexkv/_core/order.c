/* Who leaves first: one order per tier of exactly the blocks the tier could evict now.
 *
 * An order is a list that ascends and a 4-ary heap beside it; the next victim is the smaller of their first blocks. A
 * block that is not smaller than the list's last, or smaller than its first, joins the list in O(1): under lru, fifo,
 * mru and filo that is nearly every block. Others go to the heap.
 *
 * When a victim leaves, its parent usually becomes evictable with a rank that is not larger: it is the next victim and
 * joins nothing at all, so a chain costs O(1) per block. Blocks that are not evictable keep their rank beside. */
#include <string.h>

#include "index_impl.h"

#define FX_SCOUT 8        /* ancestors to look ahead while a chain is evicted */
#define FX_LEAVES 16      /* leaves of the list to look ahead */
#define FX_FREE_AHEAD 128 /* victims to look ahead while their entries are freed */

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
  tier->spot[block_of(index, standing)] = (fx_spot){FX_IN_HEAP, place};
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

static void heap_remove(fx_index *index, fx_tier *tier, uint32_t place) {
  uint32_t last = --tier->end;
  if (place != last) settle_place(index, tier, place, tier->heap[last]);
}

static inline int fits_list(const fx_tier *tier, fx_standing standing) {
  return tier->last == FX_NONE || !before(standing, tier->standing[tier->last]) ||
         before(standing, tier->standing[tier->first]);
}

/* Put a block that is evictable into the order. */
static void join(fx_index *index, fx_tier *tier, uint32_t block) {
  fx_standing standing = tier->standing[block];
  if (!fits_list(tier, standing)) {
    sift_up(index, tier, tier->end++, standing);
  } else if (tier->last == FX_NONE) {
    tier->spot[block] = (fx_spot){FX_NONE, FX_NONE};
    tier->first = tier->last = block;
  } else if (before(standing, tier->standing[tier->first])) {
    tier->spot[block] = (fx_spot){tier->first, FX_NONE};
    tier->first = tier->spot[tier->first].prev = block;
  } else {
    tier->spot[block] = (fx_spot){FX_NONE, tier->last};
    tier->last = tier->spot[tier->last].next = block;
  }
}

/* Take a block out of the order. */
static void part(fx_index *index, fx_tier *tier, uint32_t block) {
  fx_spot spot = tier->spot[block];
  if (spot.next == FX_IN_HEAP) {
    heap_remove(index, tier, spot.prev);
    return;
  }
  *(spot.prev == FX_NONE ? &tier->first : &tier->spot[spot.prev].next) = spot.next;
  *(spot.next == FX_NONE ? &tier->last : &tier->spot[spot.next].prev) = spot.prev;
}

/* `next` takes the place of `block`; both may stand anywhere. */
static void succeed(fx_index *index, fx_tier *tier, uint32_t block, uint32_t next) {
  fx_spot spot = tier->spot[block];
  if (spot.next == FX_IN_HEAP && !fits_list(tier, tier->standing[next])) {
    settle_place(index, tier, spot.prev, tier->standing[next]);
    return;
  }
  part(index, tier, block);
  join(index, tier, next);
}

void fx_index_requeue(fx_index *index, uint32_t block, unsigned tiers) {
  for (; tiers; tiers &= tiers - 1) {
    uint32_t tier = (uint32_t)__builtin_ctz(tiers);
    index->masks[block].queued ^= (uint8_t)(1u << tier);
    if (index->masks[block].queued >> tier & 1)
      join(index, &index->tier[tier], block);
    else
      part(index, &index->tier[tier], block);
  }
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
  if (!(index->masks[block].queued >> tier_number & 1)) {
    tier->standing[block] = standing;
  } else if (tier->spot[block].next == FX_IN_HEAP) {
    tier->standing[block] = standing;
    succeed(index, tier, block, block);
  } else {
    part(index, tier, block); /* before its rank changes: the list's ends must not lie */
    tier->standing[block] = standing;
    join(index, tier, block);
  }
}

void fx_order_set(fx_index *index, uint32_t tier, uint32_t block, double value, uint64_t call) {
  stand(index, tier, block, (fx_standing){call << index->block_bits | block, comparable(value)});
}

int fx_order_rank(fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, double value) {
  if (value != value) return FX_INDEX_RANK;
  uint64_t stamp = fx_order_call(index, tier) << index->block_bits, rank = comparable(value);
  for (uint32_t i = 0; i < n; i++) {
    if (!fx_known(index, blocks[i])) return FX_INDEX_NO_BLOCK;
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

/* The block leaves the tier on trial: readiness and counts change as if it had gone, entries and slots stay. Returns
 * the ancestor that became evictable by this, or FX_NONE; the order is left to the caller. */
static inline uint32_t leave(fx_index *index, uint32_t tier, uint32_t block) {
  uint8_t keep = (uint8_t) ~(1u << tier);
  uint32_t parent = index->nodes[block].parent, changed = parent;
  index->masks[block].ready &= keep;
  index->masks[block].queued &= keep;
  if (parent == FX_NONE) return FX_NONE;
  if (!--index->tier[tier].kids[parent]) index->masks[parent].busy &= keep;
  /* An entry without anything left goes, and then maybe the ghosts above it. */
  for (uint32_t gone = block; fx_is_empty(index, gone); changed = index->nodes[gone].parent) {
    if (changed == FX_NONE) return FX_NONE;
    index->nodes[changed].children--;
    gone = changed;
    if (!fx_is_empty(index, gone)) break;
  }
  if ((index->masks[changed].queued | ~fx_evictable(index, changed)) >> tier & 1) return FX_NONE;
  index->masks[changed].queued |= (uint8_t)~keep;
  return changed;
}

/* The same, and the order follows. */
static void release(fx_index *index, uint32_t tier_number, uint32_t block) {
  uint32_t next = leave(index, tier_number, block);
  if (next == FX_NONE)
    part(index, &index->tier[tier_number], block);
  else
    succeed(index, &index->tier[tier_number], block, next);
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
  index->masks[block].queued |= bit;
  if (changed != FX_NONE && (index->masks[changed].queued & bit) && !(fx_evictable(index, changed) & bit)) {
    index->masks[changed].queued &= (uint8_t)~bit;
    succeed(index, tier, changed, block);
  } else {
    join(index, tier, block);
  }
}

/* Fetch what it will take to evict a block. */
static inline void prefetch_victim(const fx_index *index, const fx_tier *tier, uint32_t block) {
  __builtin_prefetch(&index->nodes[block], 1);
  __builtin_prefetch(&index->masks[block], 1);
  __builtin_prefetch(&tier->kids[block], 1);
  __builtin_prefetch(&tier->standing[block]);
}

/* Fetch a block and its nearest ancestors, which mostly lie right before it. */
static inline void prefetch_chain(const fx_index *index, const fx_tier *tier, uint32_t block) {
  for (uint32_t back = 0; back < FX_SCOUT && back <= block; back += 64 / sizeof(fx_node)) {
    __builtin_prefetch(&index->nodes[block - back], 1);
    __builtin_prefetch(&tier->standing[block - back]);
  }
  __builtin_prefetch(&index->masks[block], 1);
  __builtin_prefetch(&tier->kids[block], 1);
  __builtin_prefetch(&tier->slot[block]);
}

/* Where a chain goes on elsewhere is known only after reads one after the other: do them early, for what is fetched
 * already, and fetch the place behind the first (second, ...) jump. */
static inline void prefetch_jump(const fx_index *index, const fx_tier *tier, uint32_t leaf, int jumps) {
  uint32_t block = leaf;
  for (int left = FX_SCOUT * jumps; left > 0; left--) {
    uint32_t above = index->nodes[block].parent;
    if (above == FX_NONE) return;
    if (!fx_follows(block, above) && !--jumps) {
      prefetch_chain(index, tier, above);
      __builtin_prefetch(&index->keys[block]);
      return;
    }
    block = above;
    if (index->nodes[block].children > 1) return; /* the chain ends here */
  }
}

/* A look ahead along the list of a tier: leaves are fetched long before their turn, their branch points later. Only the
 * first of the list ever leaves it meanwhile, and `far` stays ahead of that. */
typedef struct {
  uint32_t far, steps;
  uint32_t leaf[FX_LEAVES]; /* a ring of the latest steps */
} fx_outlook;

static inline void step(const fx_index *index, const fx_tier *tier, fx_outlook *outlook) {
  uint32_t at = outlook->steps++ % FX_LEAVES;
  if (outlook->far != FX_NONE) outlook->far = tier->spot[outlook->far].next;
  outlook->leaf[at] = outlook->far;
  if (outlook->far != FX_NONE) {
    __builtin_prefetch(&tier->spot[outlook->far], 1);
    prefetch_chain(index, tier, outlook->far);
  }
  for (uint32_t jumps = 1; jumps < 4; jumps++) {
    uint32_t known = outlook->leaf[(at + FX_LEAVES - FX_LEAVES / 4 * jumps) % FX_LEAVES];
    if (known != FX_NONE) prefetch_jump(index, tier, known, (int)jumps);
  }
}

/* The first of the list is about to be taken. */
static inline void look_ahead(const fx_index *index, const fx_tier *tier, fx_outlook *outlook) {
  if (outlook->steps < FX_LEAVES) step(index, tier, outlook); /* gain distance */
  step(index, tier, outlook);
}

static const fx_standing LAST = {~0ull, ~0ull};

/* The first of the heap's root and the list's first, and in `rival` who is next. */
static uint32_t foremost(const fx_index *index, const fx_tier *tier, fx_standing *rival) {
  fx_standing root = tier->end > FX_ROOT ? tier->heap[FX_ROOT] : LAST;
  uint32_t first = tier->first, second = first == FX_NONE ? FX_NONE : tier->spot[first].next;
  fx_standing listed = first == FX_NONE ? LAST : tier->standing[first];
  if (before(listed, root)) {
    *rival = second != FX_NONE && before(tier->standing[second], root) ? tier->standing[second] : root;
    return first;
  }
  *rival = listed;
  for (uint32_t place = FX_ROOT + 1; place < FX_ROOT + 5 && place < tier->end; place++) {
    prefetch_victim(index, tier, block_of(index, tier->heap[place]));
    if (before(tier->heap[place], *rival)) *rival = tier->heap[place];
  }
  return tier->end > FX_ROOT ? block_of(index, root) : FX_NONE;
}

static uint32_t take(fx_index *index, uint32_t tier_number, uint32_t count) {
  fx_tier *tier = &index->tier[tier_number];
  fx_outlook outlook = {.far = tier->first};
  uint32_t taken = 0;
  memset(outlook.leaf, 0xFF, sizeof outlook.leaf);
  while (taken < count) {
    fx_standing rival;
    uint32_t first = foremost(index, tier, &rival), block = first, next = FX_NONE, scout = first;
    if (first == FX_NONE) break;
    if (first == tier->first) look_ahead(index, tier, &outlook);
    for (int i = 0; i < FX_SCOUT && scout != FX_NONE; i++)
      scout = i && index->nodes[scout].children > 1 ? FX_NONE : index->nodes[scout].parent;
    for (;; block = next) { /* up the chain, without touching the order, while nobody else comes before */
      if (scout != FX_NONE) {
        prefetch_victim(index, tier, scout);
        scout = index->nodes[scout].children > 1 ? FX_NONE : index->nodes[scout].parent; /* a branch ends the chain */
      }
      next = leave(index, tier_number, block);
      index->trial[index->trials++] = block;
      taken++;
      if (next == FX_NONE || taken == count || !before(tier->standing[next], rival)) break;
    }
    if (next == FX_NONE)
      part(index, tier, first);
    else
      succeed(index, tier, first, next);
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
    if (!(index->masks[blocks[i]].queued >> tier & 1)) continue;
    release(index, tier, blocks[i]);
    index->trial[index->trials++] = accepted[taken++] = blocks[i];
  }
  return taken;
}

void fx_trial_end(fx_index *index, uint32_t tier) {
  while (index->trials) bring_back(index, tier, index->trial[--index->trials]);
}

/* The victim's entry goes if nothing is left, then the ghosts above it, up to the next victim; the other tiers' orders
 * learn of it. Child counts were brought down by release. */
static void commit(fx_index *index, uint32_t block, uint32_t next) {
  while (block != next && fx_alive(index, block)) {
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

/* The same for the first of n victims and those after it of which each is the left neighbour and the parent of the one
 * before, as far as their entries go. Returns how many. */
static uint32_t commit_run(fx_index *index, const uint32_t *blocks, uint32_t n) {
  uint32_t block = blocks[0], length = 0;
  fx_node *node = &index->nodes[block];
  while (!index->every_key && length + 1 < n && blocks[length + 1] == block - length - 1 && fx_is_empty(index, block - length) &&
         node->parent == block - length - 1) {
    node->parent = FX_UNUSED;
    node--;
    length++;
  }
  if (length) {
    fx_free_run(index, block - length + 1, length);
    return length;
  }
  commit(index, block, n > 1 ? blocks[1] : FX_NONE);
  return 1;
}

uint32_t fx_index_evict(fx_index *index, uint32_t tier, uint32_t count, uint32_t *blocks, uint32_t *slots) {
  uint32_t taken = take(index, tier, count), ahead = 0;
  memcpy(blocks, index->trial, taken * sizeof *blocks);
  index->trials = 0;
  index->tier[tier].resident -= taken;
  for (uint32_t i = 0; i < taken; i++) {
    slots[i] = index->tier[tier].slot[blocks[i]];
    if (!fx_unlisted(index, blocks[i], index->nodes[blocks[i]].parent)) __builtin_prefetch(&index->keys[blocks[i]]);
  }
  for (uint32_t i = 0; i < taken; i += commit_run(index, blocks + i, taken - i)) {
    if (ahead < i) ahead = i;
    for (; ahead < taken && ahead < i + FX_FREE_AHEAD; ahead++) fx_prefetch_free(index, blocks[ahead]);
  }
  fx_give_loose(index);
  return taken;
}

int fx_index_evictable(const fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, uint8_t *mask) {
  for (uint32_t i = 0; i < n; i++) {
    if (blocks[i] >= index->max_blocks) return FX_INDEX_NO_BLOCK;
    mask[i] = index->masks[blocks[i]].queued >> tier & 1;
  }
  return 0;
}
