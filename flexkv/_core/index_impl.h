/* The inside of the index, shared by index.c (entries, residency), order.c (who leaves first), alone.c, restore.c,
 * check.c. */
#ifndef FX_INDEX_IMPL_H
#define FX_INDEX_IMPL_H
#include <stddef.h>

#include "index.h"
#include "runs.h"

#define FX_NONE 0xFFFFFFFFu
#define FX_UNUSED 0xFFFFFFFEu /* parent of an entry that is not in use */
#define FX_MAX_TIERS 8u
#define FX_VACANT (~0ull)   /* table cell without an entry */
#define FX_ROOT 3u          /* first place of a heap: children of i are 4(i-2)..4(i-2)+3, one cache line */
#define FX_AHEAD 24u        /* table cells to prefetch ahead */
#define FX_RUN_AHEAD 128u    /* keys to prefetch ahead of a match, in case the run goes on */

typedef struct {
  uint64_t lo, hi;
} fx_key;

typedef struct {
  uint32_t parent;
  uint32_t children; /* entries that name this one as parent */
  uint32_t pins;
  uint32_t depth;
} fx_node;

/* One bit per tier. */
typedef struct {
  uint8_t ready;
  uint8_t landing;
  uint8_t busy;   /* has a child READY or LANDING there */
  uint8_t queued; /* is in the tier's order: evictable there */
} fx_mask;

/* Where a block stands in a tier's order: rank (made comparable), then call number and block number. */
typedef struct {
  uint64_t stamp, rank;
} fx_standing;

/* Where an evictable block is kept: in the list (its neighbours there) or in the heap (FX_IN_HEAP and its place). */
typedef struct {
  uint32_t next, prev;
} fx_spot;
#define FX_IN_HEAP 0xFFFFFFFEu

typedef struct {
  uint32_t *slot;
  uint32_t *kids; /* children READY or LANDING in this tier */
  fx_standing *standing;
  fx_spot *spot;
  uint32_t first, last; /* of the list, which ascends; FX_NONE when it is empty */
  fx_standing *heap;
  uint32_t end; /* first free place of the heap */
  uint32_t resident;
  uint64_t calls; /* rank calls so far */
} fx_tier;

struct fx_index {
  uint32_t max_blocks, tiers, count;
  uint32_t block_bits; /* low bits of a stamp that name the block */
  uint64_t pinned;
  fx_key *keys;
  fx_node *nodes;
  fx_mask *masks;
  uint8_t *held;  /* tiers that keep the block as long as they can spare others, as bits */
  uint64_t holds; /* bits set in `held` */
  uint8_t foreign; /* tiers on other machines, as bits */
  uint8_t every_key; /* every entry has a cell */
  uint64_t *table; /* low half of the key << 32 | entry; linear probing */
  uint32_t table_mask;
  fx_runs *runs;
  uint32_t loose_start, loose_count; /* entries that are free but not yet given back to `runs` */
  uint32_t *trial; /* blocks taken on trial, in order */
  uint32_t trials;
  fx_tier tier[FX_MAX_TIERS];
  void *memory;
  size_t memory_bytes;
};

static inline int fx_alive(const fx_index *index, uint32_t block) {
  return block < index->max_blocks && index->nodes[block].parent != FX_UNUSED;
}

/* The same for a block that is mostly READY somewhere: masks are smaller than nodes. Dead entries have no residency. */
static inline int fx_known(const fx_index *index, uint32_t block) {
  return block < index->max_blocks && (index->masks[block].ready || index->nodes[block].parent != FX_UNUSED);
}

/* Rank 0.0, set before all others. */
static inline fx_standing fx_unranked(uint32_t block) { return (fx_standing){block, 1ull << 63}; }

static inline int fx_same(fx_key a, fx_key b) { return a.lo == b.lo && a.hi == b.hi; }

/* An entry that follows its parent is found from there and needs no cell in the table. (FX_NONE + 1 is 0: entry 0
 * follows "no parent".) A chain of new blocks so costs one cell, not one a block. */
static inline int fx_follows(uint32_t block, uint32_t parent) { return parent + 1 == block; }

/* Whether the entry has no cell: it follows its parent, and nobody looks for keys without their prefix. */
static inline int fx_unlisted(const fx_index *index, uint32_t block, uint32_t parent) {
  return fx_follows(block, parent) && !index->every_key;
}

/* Fetch what freeing the block will touch outside of its own entry. */
static inline void fx_prefetch_free(const fx_index *index, uint32_t block) {
  if (fx_unlisted(index, block, index->nodes[block].parent)) return;
  __builtin_prefetch(&index->table[(uint32_t)index->keys[block].lo & index->table_mask], 1);
  fx_runs_prefetch(index->runs, block);
}

static inline uint32_t fx_lookup(const fx_index *index, fx_key key) {
  uint32_t at = (uint32_t)key.lo & index->table_mask;
  for (;; at = (at + 1) & index->table_mask) {
    uint64_t cell = index->table[at];
    if (cell == FX_VACANT) return FX_NONE;
    if (cell >> 32 == (uint32_t)key.lo && fx_same(index->keys[(uint32_t)cell], key)) return (uint32_t)cell;
  }
}

/* The child of `parent` (FX_NONE: the first block) that has this key, or FX_NONE. */
static inline uint32_t fx_child(const fx_index *index, uint32_t parent, fx_key key) {
  uint32_t guess = parent + 1; /* at most max_blocks: a spare entry that is never alive */
  if (fx_same(index->keys[guess], key) && fx_alive(index, guess)) return guess;
  return fx_lookup(index, key);
}

/* No residency, no child: only pins (and ancestors' interest in it) can keep the entry. */
static inline int fx_is_bare(const fx_index *index, uint32_t block) {
  fx_mask mask = index->masks[block];
  return !(mask.ready | mask.landing) && !index->nodes[block].children;
}

static inline int fx_is_empty(const fx_index *index, uint32_t block) {
  return fx_is_bare(index, block) && !index->nodes[block].pins;
}

/* Tiers that could evict the block now, as bits; held ones do not. A block in a foreign tier has descendants there only
 * together with itself, readable or not, so that here it need not stay for them. */
static inline unsigned fx_evictable(const fx_index *index, uint32_t block) {
  fx_mask mask = index->masks[block];
  const fx_node *node = &index->nodes[block];
  unsigned leaf = mask.ready & ~mask.busy;
  if (!leaf || node->pins) return 0;
  if (index->holds) leaf &= ~(unsigned)index->held[block];
  unsigned somewhere = mask.ready | (mask.landing & index->foreign);
  int only_here = !(somewhere & (somewhere - 1));
  return node->children && only_here ? 0 : leaf;
}

/* order.c: bring the orders of the tiers whose bit is set in line with fx_evictable. */
void fx_index_requeue(fx_index *index, uint32_t block, unsigned tiers);

/* After any change to a block's masks, pins or children. */
static inline void fx_index_settle(fx_index *index, uint32_t block) {
  unsigned differ = fx_evictable(index, block) ^ index->masks[block].queued;
  if (differ) fx_index_requeue(index, block, differ);
}
/* order.c: set ranks; the caller has checked `block`. */
uint64_t fx_order_call(fx_index *index, uint32_t tier);
void fx_order_set(fx_index *index, uint32_t tier, uint32_t block, double value, uint64_t call);

/* index.c */
void fx_entry_add(fx_index *index, uint32_t block, fx_key key, uint32_t parent);
void fx_occupy(fx_index *index, uint32_t tier, uint32_t block, uint32_t slot); /* ABSENT -> LANDING */
/* Free the block if it is empty, and then its ancestors up to (not including) `next`, whose turn comes anyway. */
void fx_prune(fx_index *index, uint32_t block, uint32_t next);
void fx_index_vacate(fx_index *index, uint32_t tier, uint32_t block); /* LANDING or READY -> ABSENT; prunes nothing */
void fx_table_remove(fx_index *index, uint32_t block);
void fx_give_loose(fx_index *index);

/* Entries of a chain are freed leaf first: gather neighbours into one run before giving them back. */
static inline void fx_free_run(fx_index *index, uint32_t first, uint32_t count) {
  index->count -= count;
  if (first + count == index->loose_start) { /* downwards */
    index->loose_start = first;
  } else if (first != index->loose_start + index->loose_count) { /* nor upwards */
    fx_give_loose(index);
    index->loose_start = first;
  }
  index->loose_count += count;
}

static inline void fx_entry_free(fx_index *index, uint32_t block) {
  fx_node *node = &index->nodes[block];
  if (!fx_unlisted(index, block, node->parent)) fx_table_remove(index, block);
  node->parent = FX_UNUSED;
  fx_free_run(index, block, 1);
}
#endif
