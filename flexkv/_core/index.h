/* index: the prefix index, a hash table of chained keys with parent links, per-tier residency and leaf orders.
 *
 * A chained key names its whole prefix, so table + parent links are the radix tree. New chains get neighbouring
 * entries: a match looks at entry + 1 before it probes the table. Every tier keeps an order of exactly those blocks
 * that it could evict now (a 4-ary heap), so that finding victims never searches.
 *
 * Blocks are entry numbers, 0xFFFFFFFF is none; tiers are 0..7. Functions that return int return 0 or a negative
 * FX_INDEX_* below, and then (except where said) nothing was done. Not thread-safe. */
#ifndef FX_INDEX_H
#define FX_INDEX_H
#include <stdint.h>

typedef struct fx_index fx_index;

/* Why a call refused: full; no such block; key known already; block not in the state the call needs;
 * pin count would fall below 0; a rank that is not a number; no memory. */
enum {
  FX_INDEX_FULL = -1,
  FX_INDEX_NO_BLOCK = -2,
  FX_INDEX_KNOWN = -3,
  FX_INDEX_STATE = -4,
  FX_INDEX_PINS = -5,
  FX_INDEX_RANK = -6,
  FX_INDEX_MEMORY = -7
};

fx_index *fx_index_open(uint32_t max_blocks, uint32_t tiers); /* NULL when there is no memory */
void fx_index_close(fx_index *index);
void fx_index_find_any(fx_index *index); /* while it is empty: fx_index_find_alone finds keys without their prefix */
void fx_index_clear(fx_index *index);
uint32_t fx_index_count(const fx_index *index);
uint32_t fx_index_resident(const fx_index *index, uint32_t tier); /* LANDING or READY */
uint64_t fx_index_pinned(const fx_index *index);

/* Longest prefix of keys: that is READY in at least one tier (match), that has entries in any state (find). */
uint32_t fx_index_match(const fx_index *index, const uint64_t *keys, uint32_t n, uint32_t *blocks);
uint32_t fx_index_find(const fx_index *index, const uint64_t *keys, uint32_t n, uint32_t *blocks);

/* Chain n new entries below `parent`; FX_INDEX_KNOWN when the first key is there already. */
int fx_index_insert(fx_index *index, const uint64_t *keys, uint32_t n, uint32_t parent, uint32_t *blocks);

/* Blocks that stand alone: first blocks all, of keys that name their prefix like any other's. Their entries, 0xFFFFFFFF
 * where there is none; new entries for keys that have none. */
void fx_index_find_alone(const fx_index *index, const uint64_t *keys, uint32_t n, uint32_t *blocks);
int fx_index_insert_alone(fx_index *index, const uint64_t *keys, uint32_t n, uint32_t *blocks);
/* The longest end <= n at which the last `window` keys before it, or all from `first` on if that is less, are blocks
 * that stand alone and are READY in at least one tier. Fills those of blocks[first..end), returns the end. */
uint32_t fx_index_window(const fx_index *index, const uint64_t *keys, uint32_t n, uint32_t first, uint32_t window,
                         uint32_t *blocks);

/* Residency. On FX_INDEX_STATE (a block given twice) the blocks before it have changed. */
int fx_index_land(fx_index *index, uint32_t tier, const uint32_t *blocks, const uint32_t *slots, uint32_t n);
int fx_index_ready(fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n);
/* Slots come back in `slots`, 0xFFFFFFFF where the block was ABSENT; the READY ones among `blocks` in `was_ready`. */
int fx_index_drop(fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, uint32_t *slots,
                  uint32_t *was_ready, uint32_t *n_ready);
int fx_index_slots(const fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, uint32_t *slots);
/* TierState of each block; 0 (ABSENT) for entries that are gone. */
int fx_index_states(const fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, uint8_t *states);
/* The blocks that are READY in the tier, in order; returns how many. */
int64_t fx_index_select(const fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, uint32_t *ready);
/* All blocks READY in the tier, parents before children where they are neighbours; returns how many. A full scan. */
uint32_t fx_index_all(const fx_index *index, uint32_t tier, uint32_t *blocks);

/* How many of the last blocks of a chain nothing else uses: not pinned, LANDING nowhere, no other child. */
int64_t fx_index_removable(const fx_index *index, const uint32_t *blocks, uint32_t n);

/* Those of `blocks` that are ABSENT in `lower`, and their ancestors, upwards to the first that is not READY in `tier` or
 * is not ABSENT in `lower`: each once, as depth << 32 | block, ancestors first; those at the end, as many as *alone says,
 * would be in `lower` without an ancestor. `found` and `room` have `limit` places, more than n and all of `tier` together.
 * Returns how many. */
int64_t fx_index_lacking(const fx_index *index, uint32_t tier, uint32_t lower, const uint32_t *blocks, uint32_t n,
                         uint64_t *found, uint64_t *room, uint32_t limit, uint32_t *alone);

/* What else could leave the tier after the blocks in `gone`, if descendants in other tiers did not count: READY there,
 * not pinned, without children there but such as leave too. Leaves first; returns how many, up to `limit`, or an error.
 * A full scan. */
int64_t fx_index_stranded(const fx_index *index, uint32_t tier, const uint32_t *gone, uint32_t n, uint32_t limit,
                          uint32_t *blocks);

int fx_index_pin(fx_index *index, const uint32_t *blocks, uint32_t n);
int fx_index_unpin(fx_index *index, const uint32_t *blocks, uint32_t n); /* prunes what has nothing left */

/* Hold blocks in a tier (on = 1), or no more: nobody evicts what is held. Blocks that have left may be let go. */
int fx_index_hold(fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, int on);

int fx_index_keys(const fx_index *index, const uint32_t *blocks, uint32_t n, uint64_t *keys);
int fx_index_parents(const fx_index *index, const uint32_t *blocks, uint32_t n, uint32_t *parents);
int fx_index_depths(const fx_index *index, const uint32_t *blocks, uint32_t n, uint32_t *depths);

/* Ranks: the smallest leaves first; ties in the order of the calls that set them, then by block number. */
int fx_order_rank(fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, double value);
int fx_order_rank_each(fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, const double *values);
int fx_order_ranks(const fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, double *values);

/* 1 where the block can be evicted now: READY there, not pinned, not held, no child READY or LANDING there, and READY in
 * another tier or without any child. */
int fx_index_evictable(const fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, uint8_t *mask);
/* Evict up to `count` blocks in order; returns how many. A block stays readable by fx_index_keys until the next
 * insert. */
uint32_t fx_index_evict(fx_index *index, uint32_t tier, uint32_t count, uint32_t *blocks, uint32_t *slots);
/* What fx_index_evict would take, on top of the trial that is open, if any. Changes nothing. */
int64_t fx_order_take(fx_index *index, uint32_t tier, uint32_t count, uint32_t *blocks);

/* A trial: blocks a policy proposes leave the tier's order one by one, so that their parents become evictable.
 * Returns how many of the n are accepted (written to `accepted`); fx_trial_end puts everything back. */
int64_t fx_trial_accept(fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, uint32_t count,
                        uint32_t *accepted);
void fx_trial_end(fx_index *index, uint32_t tier);

/* Rebuild from rows of a store: entries in prompt order, READY in `tier` with their slot. `blocks` lists the restored
 * ones, parents first; kept[row] is 0 for orphans, duplicates and what does not fit. Returns how many, or an error. */
int64_t fx_index_restore(fx_index *index, uint32_t tier, const uint64_t *keys, const uint64_t *parents,
                         const uint32_t *depths, const uint32_t *slots, uint32_t rows, uint8_t *kept,
                         uint32_t *blocks);

const char *fx_index_check(const fx_index *index); /* NULL, or what is wrong: a full scan */
/* All entries, for tests: keys, and for each one block, parent and, tier by tier, TierState and slot (of no meaning where
 * ABSENT). Both arrays have room for as many as there are entries; returns how many that is. */
uint32_t fx_index_dump(const fx_index *index, uint64_t *keys, uint32_t *entries);
#endif
