/* Entries, and the blocks of the tier that they stand for.
 *
 * Entries of a path have neighbouring numbers as far as possible: what is done to many of them at once are short loops
 * over columns. An entry that is linked follows its parent and is found from there; only the others are in the table. */
#include <string.h>

#include "hazard_impl.h"

/* ---- keys ---- */

static inline uint32_t cell_of(const fx_hazard *h, uint64_t name) { return (uint32_t)name & h->table_mask; }

/* The child of `parent` with that key, or FX_NONE. */
uint32_t fx_entry_find(const fx_hazard *h, uint32_t parent, const uint64_t *key) {
  uint32_t guess = parent + 1; /* at most `limit`: a spare entry that is never linked */
  if (h->linked[guess] && h->name[guess] == *key) return guess;
  for (uint32_t at = cell_of(h, *key);; at = (at + 1) & h->table_mask) {
    uint32_t cell = h->table[at];
    if (!cell) return FX_NONE;
    if (h->name[cell - 1] == *key) return cell - 1;
  }
}

/* How many of the keys are those of `entry` and of what is linked to it, one below the other. */
uint32_t fx_entries_same(const fx_hazard *h, uint32_t entry, const uint64_t *keys, uint32_t n) {
  const uint8_t *linked = h->linked + entry;
  const uint64_t *name = h->name + entry;
  uint32_t same = 1;
  while (same + 8 <= n) {
    uint64_t differ = 0, all;
    memcpy(&all, linked + same, sizeof all);
    for (uint32_t i = 0; i < 8; i++) differ |= name[same + i] ^ keys[2 * (same + i)];
    if (differ || all != 0x0101010101010101u) break;
    same += 8;
  }
  while (same < n && linked[same] && name[same] == keys[2 * same]) same++;
  return same;
}

static void table_add(fx_hazard *h, uint32_t entry) {
  uint32_t at = cell_of(h, h->name[entry]);
  while (h->table[at]) at = (at + 1) & h->table_mask;
  h->table[at] = entry + 1;
}

/* Move later cells of the cluster back, so that no tombstones pile up. */
static void table_remove(fx_hazard *h, uint32_t entry) {
  uint32_t mask = h->table_mask, hole = cell_of(h, h->name[entry]);
  while (h->table[hole] != entry + 1) hole = (hole + 1) & mask;
  for (uint32_t at = (hole + 1) & mask; h->table[at]; at = (at + 1) & mask) {
    uint32_t home = cell_of(h, h->name[h->table[at] - 1]);
    if (((at - home) & mask) < ((at - hole) & mask)) continue; /* its home lies behind the hole */
    h->table[hole] = h->table[at];
    hole = at;
  }
  h->table[hole] = 0;
}

/* ---- coming and going ---- */

/* Entries for n keys below the end of the path, which gets longer by them; their runs are not set. What is free has no
 * kids and is not here. */
void fx_entries_new(fx_hazard *h, const uint64_t *keys, uint32_t n) {
  uint32_t parent = h->length ? fx_path_at(h, h->length - 1) : FX_NONE;
  for (uint32_t i = 0, count, first; i < n; i += count) {
    count = fx_runs_take_run(h->vacant, n - i, parent == FX_NONE ? FX_NONE : parent + 1, &first);
    uint64_t *name = h->name + first;
    uint32_t *depth = h->depth + first;
    for (uint32_t k = 0; k < count; k++) name[k] = keys[2 * (i + k)];
    for (uint32_t k = 0, from = h->length; k < count; k++) depth[k] = from + k;
    memset(h->block_of + first, 0xFF, count * sizeof *h->block_of);
    memset(h->uses + first, 0, count);
    memset(h->ended + first, 0, count);
    memset(h->linked + first, 1, count);
    if (parent == FX_NONE || parent + 1 != first) {
      h->linked[first] = 0;
      h->parent[first] = parent;
      table_add(h, first);
    }
    h->path[h->pieces++] = (fx_piece){first, h->length, count};
    h->length += count;
    parent = first + count - 1;
  }
}

static void forget_block(fx_hazard *h, uint32_t entry) {
  if (h->block_of[entry] == FX_NONE) return;
  h->entry_of[h->block_of[entry]] = FX_NONE;
  h->here[entry] = 0;
}

/* Forget neighbours, of which only the first may be one that is not linked. */
void fx_entries_forget(fx_hazard *h, uint32_t first, uint32_t n) {
  const uint32_t *block_of = h->block_of + first;
  uint32_t i = 0;
  for (; i + 8 <= n; i += 8) { /* ghosts have rarely blocks */
    uint32_t all = FX_NONE;
    for (uint32_t k = 0; k < 8; k++) all &= block_of[i + k];
    if (all == FX_NONE) continue;
    for (uint32_t k = 0; k < 8; k++) forget_block(h, first + i + k);
  }
  for (; i < n; i++) forget_block(h, first + i);
  if (!h->linked[first]) table_remove(h, first);
  memset(h->linked + first, 0, n);
  fx_runs_give_run(h->vacant, first, n);
}

/* ---- pieces ---- */

/* Up to n entries that end with `last` and are linked to each other: how many, and which is the first. */
uint32_t fx_piece_up(const fx_hazard *h, uint32_t last, uint32_t n, uint32_t *first) {
  const uint8_t *linked = h->linked + last;
  uint32_t up = 0; /* steps */
  for (uint64_t eight; up + 9 <= n; up += 8) {
    memcpy(&eight, linked - up - 7, sizeof eight);
    if (eight != 0x0101010101010101u) break;
  }
  while (up + 1 < n && linked[-(ptrdiff_t)up]) up++;
  *first = last - up;
  return up + 1;
}

/* How many of n neighbours are in the tier. */
uint32_t fx_count_here(const fx_hazard *h, uint32_t first, uint32_t n) {
  const uint8_t *here = h->here + first;
  uint32_t count = 0;
  for (uint32_t i = 0; i < n; i++) count += here[i];
  return count;
}

/* The path's entry at a depth. */
uint32_t fx_path_at(const fx_hazard *h, uint32_t depth) {
  uint32_t low = 0, high = h->pieces;
  while (high - low > 1) {
    uint32_t middle = (low + high) / 2;
    *(h->path[middle].depth > depth ? &high : &low) = middle;
  }
  return h->path[low].entry + (depth - h->path[low].depth);
}

/* How many of the path's entries at depths [from, to) are in the tier. */
uint32_t fx_path_here(const fx_hazard *h, uint32_t from, uint32_t to) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < h->pieces && h->path[i].depth < to; i++) {
    const fx_piece *piece = &h->path[i];
    uint32_t end = fx_least(piece->depth + piece->count, to), start = piece->depth > from ? piece->depth : from;
    if (start < end) count += fx_count_here(h, piece->entry + (start - piece->depth), end - start);
  }
  return count;
}

/* The run's entry at a depth. */
uint32_t fx_run_at(const fx_hazard *h, const fx_run *run, uint32_t depth) {
  uint32_t entry = run->last, up = run->end - 1 - depth;
  while (up) {
    up -= fx_piece_up(h, entry, up + 1, &entry) - 1;
    if (!up) break;
    entry = fx_parent(h, entry);
    up--;
  }
  return entry;
}

/* ---- blocks ---- */

/* An entry has no block any more. */
static void part(fx_hazard *h, uint32_t entry) {
  if (entry == FX_NONE || h->block_of[entry] == FX_NONE) return;
  if (h->here[entry]) h->shared -= (uint32_t)fx_is_held(h, entry);
  h->here[entry] = 0;
  h->entry_of[h->block_of[entry]] = FX_NONE;
  h->block_of[entry] = FX_NONE;
}

static inline void place(fx_hazard *h, uint32_t entry, uint32_t block) {
  if (block == FX_NONE || h->block_of[entry] == block) return;
  if (h->entry_of[block] != FX_NONE) part(h, h->entry_of[block]);
  if (h->block_of[entry] != FX_NONE) part(h, entry);
  h->block_of[entry] = block;
  h->entry_of[block] = entry;
  if (!h->in_tier[block]) return;
  h->here[entry] = 1;
  h->shared += (uint32_t)fx_is_held(h, entry);
}

void fx_hazard_placed(fx_hazard *h, const uint32_t *blocks, uint32_t first, uint32_t n) {
  n = fx_least(first + n, h->length);
  for (uint32_t i = 0; i < h->pieces && h->path[i].depth < n; i++) {
    const fx_piece *piece = &h->path[i];
    uint32_t from = piece->depth > first ? piece->depth : first;
    uint32_t end = fx_least(piece->depth + piece->count, n);
    if (from >= end) continue;
    uint32_t entry = piece->entry + (from - piece->depth);
    const uint32_t *given = blocks + (from - first);
    if (!memcmp(h->block_of + entry, given, (end - from) * sizeof *given)) continue;
    for (; from < end; from++, entry++) place(h, entry, *given++);
  }
}

/* How many of the n blocks, from the first, are those of neighbouring entries of one run, all held or none of them. */
static uint32_t alike(const fx_hazard *h, const uint32_t *blocks, uint32_t n, int *held) {
  uint32_t entry = h->entry_of[blocks[0]], same = 1, number;
  *held = 0;
  if (entry == FX_NONE) return 1;
  const fx_run *run = &h->run[number = h->run_of[entry]];
  *held = h->depth[entry] < run->high;
  n = fx_least(n, (*held ? run->high : run->end) - h->depth[entry]);
  while (same < n && h->entry_of[blocks[same]] == entry + same && h->linked[entry + same] &&
         h->run_of[entry + same] == number)
    same++;
  return same;
}

uint32_t fx_hazard_came(fx_hazard *h, const uint32_t *blocks, uint32_t n, uint8_t *wanted) {
  uint32_t count = 0;
  for (uint32_t i = 0, some; i < n; i += some) {
    int held;
    some = alike(h, blocks + i, n - i, &held);
    uint32_t entry = h->entry_of[blocks[i]];
    for (uint32_t k = 0; k < some; k++) h->in_tier[blocks[i + k]] = 1;
    if (entry != FX_NONE) {
      if (held) h->shared += some - fx_count_here(h, entry, some);
      memset(h->here + entry, 1, some);
    }
    memset(wanted + i, held, some);
    if (held) count += some;
  }
  return h->following ? count : n;
}

/* How many of the n blocks, from the first, are those of neighbouring entries of one run, each the parent of the one
 * before it: as blocks leave. */
static uint32_t rising(const fx_hazard *h, const uint32_t *blocks, uint32_t n) {
  uint32_t entry = h->entry_of[blocks[0]], up = 0;
  n = fx_least(n, h->depth[entry] + 1 - h->run[h->run_of[entry]].low);
  while (up + 1 < n && h->linked[entry - up] && h->entry_of[blocks[up + 1]] == entry - up - 1) up++;
  return up + 1;
}

void fx_hazard_left(fx_hazard *h, const uint32_t *blocks, uint32_t n) {
  for (uint32_t i = 0, some; i < n; i += some) {
    uint32_t last = h->entry_of[blocks[i]];
    some = 1;
    h->in_tier[blocks[i]] = 0;
    if (last == FX_NONE) continue;
    some = rising(h, blocks + i, n - i);
    uint32_t first = last + 1 - some, high = h->run[h->run_of[last]].high;
    if (h->depth[first] < high) h->shared -= fx_count_here(h, first, fx_least(some, high - h->depth[first]));
    memset(h->here + first, 0, some);
    memset(h->block_of + first, 0xFF, some * sizeof *h->block_of);
    for (uint32_t k = i; k < i + some; k++) {
      h->entry_of[blocks[k]] = FX_NONE;
      h->in_tier[blocks[k]] = 0;
    }
  }
}

uint32_t fx_hazard_wanted(const fx_hazard *h, const uint32_t *blocks, uint32_t n, uint8_t *wanted) {
  uint32_t count = 0;
  if (!h->following) return n;
  for (uint32_t i = 0, some; i < n; i += some) {
    int held;
    some = alike(h, blocks + i, n - i, &held);
    memset(wanted + i, held, some);
    if (held) count += some;
  }
  return count;
}
