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

/* How many neighbours, from `entry` on and at most n, follow each its parent. */
static uint32_t chain(const fx_hazard *h, uint32_t entry, uint32_t n) {
  const uint8_t *linked = h->linked + entry;
  uint32_t count = 1;
  for (uint64_t eight; count + 8 <= n; count += 8) {
    memcpy(&eight, linked + count, sizeof eight);
    if (eight != 0x0101010101010101u) break;
  }
  while (count < n && linked[count]) count++;
  return count;
}

/* How many of the keys are those of `entry`, which has the first, and of what is linked to it, one below the other. A
 * key stands for all that is above it: where the deepest is the same all are, and else bisection finds the last. */
uint32_t fx_entries_same(const fx_hazard *h, uint32_t entry, const uint64_t *keys, uint32_t n) {
  const uint64_t *name = h->name + entry;
  uint32_t end = chain(h, entry, n), same = 0, differs = end - 1;
  if (name[differs] == keys[2 * (size_t)differs]) return end;
  while (differs - same > 1) {
    uint32_t middle = (same + differs) / 2;
    *(name[middle] == keys[2 * (size_t)middle] ? &same : &differs) = middle;
  }
  return differs;
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
  fx_set_entry(h, h->block_of[entry], FX_NO_ENTRY);
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
  uint32_t count = 0, i = 0;
  while (i + 8 <= n) { /* 0 or 1 in each byte: sums of up to 255 words stay apart */
    uint64_t sums = 0, eight;
    for (uint32_t end = i + fx_least((n - i) / 8, 255) * 8; i < end; i += 8) {
      memcpy(&eight, here + i, sizeof eight);
      sums += eight;
    }
    uint64_t pairs = (sums & 0x00FF00FF00FF00FFu) + (sums >> 8 & 0x00FF00FF00FF00FFu);
    count += (uint32_t)(pairs * 0x0001000100010001u >> 48);
  }
  for (; i < n; i++) count += here[i];
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
  if (h->block_of[entry] == FX_NONE) return;
  if (h->here[entry]) h->shared -= (uint32_t)fx_is_held(h, entry);
  h->here[entry] = 0;
  fx_set_entry(h, h->block_of[entry], FX_NO_ENTRY);
  h->block_of[entry] = FX_NONE;
}

/* Blocks of neighbouring entries. */
static void place(fx_hazard *h, uint32_t first, const uint32_t *blocks, uint32_t n) {
  uint32_t *block_of = h->block_of + first, *tag = h->tag;
  for (uint32_t i = 0; i < n; i++) {
    uint32_t block = blocks[i], entry = first + i;
    if (block == FX_NONE || block_of[i] == block) continue;
    if (tag[block] >> 1 != FX_NO_ENTRY) part(h, tag[block] >> 1);
    part(h, entry);
    block_of[i] = block;
    if (tag[block] & 1) {
      h->here[entry] = 1;
      h->shared += (uint32_t)fx_is_held(h, entry);
    }
    tag[block] = entry << 1 | (tag[block] & 1);
  }
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
    place(h, entry, given, end - from);
  }
}

/* How many of the n blocks, from the first, are those of neighbouring entries of one run, all held or none of them. */
static uint32_t alike(const fx_hazard *h, const uint32_t *blocks, uint32_t n, int *held) {
  uint32_t entry = fx_entry_of(h, blocks[0]), same = 1, number;
  *held = 0;
  if (entry == FX_NO_ENTRY) return 1;
  const fx_run *run = &h->run[number = h->run_of[entry]];
  *held = h->depth[entry] < run->high;
  n = fx_least(n, (*held ? run->high : run->end) - h->depth[entry]);
  while (same < n && fx_entry_of(h, blocks[same]) == entry + same && h->linked[entry + same] &&
         h->run_of[entry + same] == number)
    same++;
  return same;
}

uint32_t fx_hazard_came(fx_hazard *h, const uint32_t *blocks, uint32_t n, uint8_t *wanted) {
  uint32_t count = 0, *tag = h->tag;
  for (uint32_t i = 0, some; i < n; i += some) {
    int held;
    some = alike(h, blocks + i, n - i, &held);
    uint32_t entry = fx_entry_of(h, blocks[i]);
    for (uint32_t k = i; k < i + some; k++) tag[blocks[k]] |= 1;
    if (entry != FX_NO_ENTRY) {
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
  uint32_t entry = fx_entry_of(h, blocks[0]), up = 0;
  n = fx_least(n, h->depth[entry] + 1 - h->run[h->run_of[entry]].low);
  while (up + 1 < n && h->linked[entry - up] && fx_entry_of(h, blocks[up + 1]) == entry - up - 1) up++;
  return up + 1;
}

void fx_hazard_left(fx_hazard *h, const uint32_t *blocks, uint32_t n) {
  uint32_t *tag = h->tag;
  for (uint32_t i = 0, some; i < n; i += some) {
    uint32_t last = fx_entry_of(h, blocks[i]);
    some = 1;
    tag[blocks[i]] &= ~1u;
    if (last == FX_NO_ENTRY) continue;
    some = rising(h, blocks + i, n - i);
    uint32_t first = last + 1 - some, high = h->run[h->run_of[last]].high;
    if (h->depth[first] < high) h->shared -= fx_count_here(h, first, fx_least(some, high - h->depth[first]));
    memset(h->here + first, 0, some);
    memset(h->block_of + first, 0xFF, some * sizeof *h->block_of);
    for (uint32_t k = i; k < i + some; k++) tag[blocks[k]] = FX_NO_ENTRY << 1;
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
