/* Rebuild the index from the rows of a reopened store.
 *
 * Rows come in any order. They are linked into trees first and then walked depth first, so that a prompt's blocks get
 * neighbouring entries again: a match after a restart is as fast as before it. */
#include <stdlib.h>
#include <string.h>

#include "index_impl.h"

#define DUPLICATE 0xFFFFFFFEu

typedef struct {
  const fx_key *keys, *parents;
  const uint32_t *depths;
  uint32_t rows;
  uint32_t *table; /* row by key, linear probing */
  uint64_t mask;
  uint32_t *known; /* entry by key, for what the index held before */
  uint64_t known_mask;
  uint32_t *parent;  /* row, FX_NONE or DUPLICATE */
  uint32_t *anchor;  /* entry that was in the index before */
  uint32_t *child;   /* first child row */
  uint32_t *sibling; /* next row below the same parent, or next root */
  uint32_t *order;   /* rows, parents first */
  uint32_t *entry;   /* entry of a row */
  uint32_t roots;
  void *memory;
} forest;

static uint64_t cells_for(uint64_t count) {
  uint64_t cells = 16;
  while (cells < 2 * count) cells *= 2;
  return cells;
}

static int forest_open(const fx_index *index, forest *trees) {
  size_t rows = trees->rows, cells = cells_for(rows), known = cells_for(index->count);
  size_t size = (cells + known + 6 * rows) * sizeof(uint32_t);
  uint32_t *memory = malloc(size);
  if (!memory) return -1;
  memset(memory, 0xFF, size);
  trees->memory = trees->table = memory;
  trees->mask = cells - 1;
  trees->known = memory + cells;
  trees->known_mask = known - 1;
  trees->parent = trees->known + known;
  trees->anchor = trees->parent + rows;
  trees->child = trees->anchor + rows;
  trees->sibling = trees->child + rows;
  trees->order = trees->sibling + rows;
  trees->entry = trees->order + rows;
  trees->roots = FX_NONE;
  return 0;
}

/* The cell of a key: its row, or the vacant cell where it would go. */
static uint32_t *find_row(const forest *trees, fx_key key) {
  uint64_t at = key.lo & trees->mask;
  while (trees->table[at] != FX_NONE && !fx_same(trees->keys[trees->table[at]], key)) at = (at + 1) & trees->mask;
  return &trees->table[at];
}

static void index_rows(forest *trees) {
  for (uint32_t row = 0; row < trees->rows; row++) {
    if (row + FX_AHEAD < trees->rows)
      __builtin_prefetch(&trees->table[trees->keys[row + FX_AHEAD].lo & trees->mask], 1);
    uint32_t *cell = find_row(trees, trees->keys[row]);
    if (*cell == FX_NONE)
      *cell = row;
    else
      trees->parent[row] = DUPLICATE;
  }
}

/* The same for the entries of the index: most have no cell in its own table. */
static uint32_t *find_known(const fx_index *index, const forest *trees, fx_key key) {
  uint64_t at = key.lo & trees->known_mask;
  while (trees->known[at] != FX_NONE && !fx_same(index->keys[trees->known[at]], key))
    at = (at + 1) & trees->known_mask;
  return &trees->known[at];
}

static void index_known(const fx_index *index, forest *trees) {
  for (uint32_t block = 0; index->count && block < index->max_blocks; block++)
    if (fx_alive(index, block)) *find_known(index, trees, index->keys[block]) = block;
}

static void push_front(forest *trees, uint32_t *list, uint32_t row) {
  trees->sibling[row] = *list;
  *list = row;
}

/* Hang every row below its parent: a row, an entry of the index, or nothing for a first block. A parent must be
 * exactly one block shorter; rows without one stay unlinked. */
static void link_rows(const fx_index *index, forest *trees) {
  for (uint32_t row = trees->rows; row-- > 0;) { /* backwards: lists come out in row order */
    if (trees->parent[row] == DUPLICATE) continue;
    if (trees->depths[row] == 0) {
      push_front(trees, &trees->roots, row);
      continue;
    }
    uint32_t above = *find_row(trees, trees->parents[row]);
    if (above != FX_NONE) {
      if (trees->depths[above] + 1 != trees->depths[row]) continue;
      trees->parent[row] = above;
      push_front(trees, &trees->child[above], row);
      continue;
    }
    uint32_t entry = *find_known(index, trees, trees->parents[row]);
    if (entry == FX_NONE || index->nodes[entry].depth + 1 != trees->depths[row]) continue;
    trees->anchor[row] = entry;
    push_front(trees, &trees->roots, row);
  }
}

/* Depth first, parents before children, without recursion; returns how many rows hang on a root. */
static uint32_t walk_rows(forest *trees) {
  uint32_t visited = 0, row = trees->roots;
  while (row != FX_NONE) {
    trees->order[visited++] = row;
    if (trees->child[row] != FX_NONE) {
      row = trees->child[row];
      continue;
    }
    while (trees->sibling[row] == FX_NONE && trees->parent[row] != FX_NONE) row = trees->parent[row];
    row = trees->sibling[row];
  }
  return visited;
}

/* Give every walked row its entry: the one it has, or a new one below its parent's while there are any. */
static int place_rows(fx_index *index, forest *trees, uint32_t visited) {
  uint32_t wanted = 0, used = 0;
  for (uint32_t i = 0; i < visited; i++) {
    uint32_t row = trees->order[i];
    trees->entry[row] = *find_known(index, trees, trees->keys[row]);
    wanted += trees->entry[row] == FX_NONE;
  }
  if (wanted > fx_runs_free(index->runs)) wanted = fx_runs_free(index->runs);
  uint32_t *fresh = malloc(((size_t)wanted + 1) * sizeof *fresh);
  if (!fresh) return -1;
  fx_runs_take(index->runs, wanted, FX_NONE, fresh);
  for (uint32_t i = 0; i < visited; i++) {
    uint32_t row = trees->order[i], above = trees->anchor[row];
    if (trees->entry[row] != FX_NONE) continue;
    if (trees->parent[row] != FX_NONE) {
      above = trees->entry[trees->parent[row]];
      if (above == FX_NONE) continue; /* its parent did not fit */
    }
    if (used == wanted) continue;
    trees->entry[row] = fresh[used++];
    fx_entry_add(index, trees->entry[row], trees->keys[row], above);
  }
  fx_runs_give(index->runs, fresh + used, wanted - used);
  free(fresh);
  return 0;
}

int64_t fx_index_restore(fx_index *index, uint32_t tier, const uint64_t *keys, const uint64_t *parents,
                         const uint32_t *depths, const uint32_t *slots, uint32_t rows, uint8_t *kept,
                         uint32_t *blocks) {
  forest trees = {.keys = (const fx_key *)keys, .parents = (const fx_key *)parents, .depths = depths, .rows = rows};
  if (forest_open(index, &trees)) return FX_INDEX_MEMORY;
  index_rows(&trees);
  index_known(index, &trees);
  link_rows(index, &trees);
  uint32_t visited = walk_rows(&trees), count = 0;
  unsigned bit = 1u << tier;
  memset(kept, 0, rows);
  if (place_rows(index, &trees, visited)) {
    free(trees.memory);
    return FX_INDEX_MEMORY;
  }
  for (uint32_t i = 0; i < visited; i++) {
    uint32_t row = trees.order[i], block = trees.entry[row];
    if (block == FX_NONE || ((index->masks[block].ready | index->masks[block].landing) & bit)) continue;
    fx_occupy(index, tier, block, slots[row]);
    index->masks[block].landing &= (uint8_t)~bit;
    index->masks[block].ready |= (uint8_t)bit;
    kept[row] = 1;
    blocks[count++] = block;
  }
  for (uint32_t i = 0; i < visited; i++) { /* orders last: most blocks have got a child by now */
    uint32_t row = trees.order[i];
    if (trees.entry[row] != FX_NONE) fx_index_settle(index, trees.entry[row]);
    if (trees.anchor[row] != FX_NONE) fx_index_settle(index, trees.anchor[row]);
  }
  free(trees.memory);
  return count;
}
