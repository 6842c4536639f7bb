/* Entries and residency: the table, the chains, what is where. See index.h for the contract. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "index_impl.h"
#include "pages.h"

/* ---- memory: one mapping for all arrays ---- */

static size_t carve(size_t *used, size_t count, size_t item_bytes) {
  size_t at = *used;
  *used = at + (count * item_bytes + 63) / 64 * 64;
  return at;
}

/* Lay the arrays out; with `base` NULL only count the bytes. */
static size_t lay_out(fx_index *index, char *base) {
  size_t used = 0, n = index->max_blocks ? index->max_blocks : 1;
  index->keys = (fx_key *)(base + carve(&used, n + 1, sizeof(fx_key)));
  index->nodes = (fx_node *)(base + carve(&used, n + 1, sizeof(fx_node)));
  index->masks = (fx_mask *)(base + carve(&used, n + 1, sizeof(fx_mask)));
  index->table = (uint64_t *)(base + carve(&used, (size_t)index->table_mask + 1, sizeof(uint64_t)));
  index->trial = (uint32_t *)(base + carve(&used, n, sizeof(uint32_t)));
  for (uint32_t t = 0; t < index->tiers; t++) {
    fx_tier *tier = &index->tier[t];
    tier->slot = (uint32_t *)(base + carve(&used, n, sizeof(uint32_t)));
    tier->kids = (uint32_t *)(base + carve(&used, n, sizeof(uint32_t)));
    tier->spot = (fx_spot *)(base + carve(&used, n, sizeof(fx_spot)));
    tier->standing = (fx_standing *)(base + carve(&used, n, sizeof(fx_standing)));
    tier->heap = (fx_standing *)(base + carve(&used, n + FX_ROOT + 1, sizeof(fx_standing)));
  }
  index->held = (uint8_t *)(base + carve(&used, n, sizeof(uint8_t)));
  return used;
}

static void make_empty(fx_index *index) {
  size_t entries = (size_t)index->max_blocks + 1;
  index->count = 0;
  index->pinned = 0;
  index->holds = 0;
  index->trials = 0;
  index->loose_start = FX_NONE;
  index->loose_count = 0;
  memset(index->masks, 0, entries * sizeof *index->masks);
  memset(index->held, 0, index->max_blocks);
  for (size_t i = 0; i < entries; i++) index->nodes[i].parent = FX_UNUSED;
  memset(index->table, 0xFF, ((size_t)index->table_mask + 1) * sizeof *index->table);
  for (uint32_t t = 0; t < index->tiers; t++) {
    fx_tier *tier = &index->tier[t];
    memset(tier->kids, 0, (size_t)index->max_blocks * sizeof *tier->kids);
    memset(tier->standing, 0, (size_t)index->max_blocks * sizeof *tier->standing);
    tier->first = tier->last = FX_NONE;
    tier->end = FX_ROOT;
    tier->resident = 0;
    tier->calls = 0;
  }
}

fx_index *fx_index_open(uint32_t max_blocks, uint32_t tiers) {
  if (tiers < 1 || tiers > FX_MAX_TIERS || max_blocks > 1u << 30) return NULL;
  fx_index *index = calloc(1, sizeof *index);
  if (!index) return NULL;
  uint64_t cells = 16; /* four times the entries: probes mostly end where they begin, and so do removals */
  while (cells < 4 * (uint64_t)max_blocks) cells *= 2;
  index->max_blocks = max_blocks;
  index->tiers = tiers;
  index->table_mask = (uint32_t)(cells - 1);
  while (1ull << index->block_bits < max_blocks) index->block_bits++;
  index->memory_bytes = lay_out(index, NULL);
  index->memory = fx_pages_map(index->memory_bytes);
  index->runs = fx_runs_open(max_blocks);
  if (!index->memory || !index->runs) {
    fx_index_close(index);
    return NULL;
  }
  lay_out(index, index->memory);
  make_empty(index);
  return index;
}

void fx_index_close(fx_index *index) {
  if (!index) return;
  fx_pages_unmap(index->memory, index->memory_bytes);
  fx_runs_close(index->runs);
  free(index);
}

void fx_index_clear(fx_index *index) {
  for (uint32_t block = 0; block < index->max_blocks; block++)
    if (fx_alive(index, block)) fx_runs_give_run(index->runs, block, 1);
  make_empty(index);
}

void fx_index_find_any(fx_index *index) {
  index->every_key = 1; /* while it is empty */
}

uint32_t fx_index_count(const fx_index *index) { return index->count; }
uint32_t fx_index_resident(const fx_index *index, uint32_t tier) { return index->tier[tier].resident; }
uint64_t fx_index_pinned(const fx_index *index) { return index->pinned; }

/* ---- the table ---- */

static void table_add(fx_index *index, uint32_t block) {
  if (fx_unlisted(index, block, index->nodes[block].parent)) return;
  uint32_t tag = (uint32_t)index->keys[block].lo, at = tag & index->table_mask;
  while (index->table[at] != FX_VACANT) at = (at + 1) & index->table_mask;
  index->table[at] = (uint64_t)tag << 32 | block;
}

/* Remove the cell of a block that has one and move later ones of the cluster back, so that no tombstones pile up over months of eviction. */
void fx_table_remove(fx_index *index, uint32_t block) {
  uint32_t mask = index->table_mask, hole = (uint32_t)index->keys[block].lo & mask;
  while ((uint32_t)index->table[hole] != block) hole = (hole + 1) & mask;
  for (uint32_t at = (hole + 1) & mask;; at = (at + 1) & mask) {
    uint64_t cell = index->table[at];
    if (cell == FX_VACANT) break;
    uint32_t home = (uint32_t)(cell >> 32) & mask;
    if (((at - home) & mask) < ((at - hole) & mask)) continue; /* its home lies behind the hole */
    index->table[hole] = cell;
    hole = at;
  }
  index->table[hole] = FX_VACANT;
}

/* ---- entries ---- */

void fx_entry_add(fx_index *index, uint32_t block, fx_key key, uint32_t parent) {
  index->keys[block] = key;
  index->nodes[block] = (fx_node){.parent = parent};
  index->masks[block] = (fx_mask){0};
  if (parent != FX_NONE) {
    index->nodes[block].depth = index->nodes[parent].depth + 1;
    index->nodes[parent].children++;
  }
  index->count++;
  table_add(index, block);
}

/* Chain n new entries with neighbouring numbers: all but the first follow their parent. */
static void add_run(fx_index *index, uint32_t first, const fx_key *keys, uint32_t n, uint32_t parent) {
  fx_node *node = &index->nodes[first];
  fx_entry_add(index, first, keys[0], parent);
  memcpy(&index->keys[first + 1], keys + 1, (n - 1) * sizeof *keys);
  memset(&index->masks[first + 1], 0, (n - 1) * sizeof *index->masks);
  for (uint32_t i = 1; i < n; i++)
    node[i] = (fx_node){.parent = first + i - 1, .children = 1, .depth = node->depth + i};
  node->children = 1;
  node[n - 1].children = 0;
  index->count += n - 1;
  for (uint32_t i = 1; index->every_key && i < n; i++) {
    if (i + FX_AHEAD < n) __builtin_prefetch(&index->table[(uint32_t)keys[i + FX_AHEAD].lo & index->table_mask], 1);
    table_add(index, first + i);
  }
}

/* How many of the first blocks have neighbouring numbers, ascending. */
static uint32_t run_of(const uint32_t *blocks, uint32_t n) {
  uint32_t length = 1;
  while (length < n && blocks[length] == blocks[0] + length) length++;
  return length;
}

void fx_give_loose(fx_index *index) {
  fx_runs_give_run(index->runs, index->loose_start, index->loose_count);
  index->loose_start = FX_NONE; /* follows and precedes nothing */
  index->loose_count = 0;
}

void fx_prune(fx_index *index, uint32_t block, uint32_t next) {
  while (block != FX_NONE && block != next && fx_is_empty(index, block)) {
    uint32_t parent = index->nodes[block].parent;
    fx_entry_free(index, block);
    if (parent != FX_NONE) {
      index->nodes[parent].children--;
      fx_index_settle(index, parent);
    }
    block = parent;
  }
}

/* Only the first key is looked up: a chained key is known only below its parent, and below a new entry is nothing. */
int fx_index_insert(fx_index *index, const uint64_t *words, uint32_t n, uint32_t parent, uint32_t *blocks) {
  const fx_key *keys = (const fx_key *)words;
  if (parent != FX_NONE && !fx_alive(index, parent)) return FX_INDEX_NO_BLOCK;
  if (n && fx_child(index, parent, keys[0]) != FX_NONE) return FX_INDEX_KNOWN;
  if (fx_runs_take(index->runs, n, parent == FX_NONE ? FX_NONE : parent + 1, blocks)) return FX_INDEX_FULL;
  for (uint32_t i = 0, length; i < n; i += length) {
    length = run_of(blocks + i, n - i);
    add_run(index, blocks[i], keys + i, length, i ? blocks[i - 1] : parent);
  }
  if (n && parent != FX_NONE) fx_index_settle(index, parent); /* it has a child now */
  return 0;
}

static inline __attribute__((always_inline)) uint32_t walk(const fx_index *index, const fx_key *keys, uint32_t n,
                                                           uint32_t *blocks, int readable) {
  uint32_t block = FX_NONE, i = 0;
  for (; i < n; i++) {
    uint32_t guess = block + 1; /* entry 0 for the first; one spare entry beyond the last is never alive */
    if (i % 4 == 0) __builtin_prefetch(&index->keys[guess + FX_RUN_AHEAD]); /* past the ends of pages, too */
    if (fx_same(index->keys[guess], keys[i]) && (readable ? index->masks[guess].ready : fx_alive(index, guess)))
      block = guess;
    else
      block = fx_lookup(index, keys[i]);
    if (block == FX_NONE || (readable && !index->masks[block].ready)) break;
    blocks[i] = block;
  }
  return i;
}

uint32_t fx_index_match(const fx_index *index, const uint64_t *keys, uint32_t n, uint32_t *blocks) {
  return walk(index, (const fx_key *)keys, n, blocks, 1);
}

uint32_t fx_index_find(const fx_index *index, const uint64_t *keys, uint32_t n, uint32_t *blocks) {
  return walk(index, (const fx_key *)keys, n, blocks, 0);
}

/* ---- residency ---- */

static int all_alive(const fx_index *index, const uint32_t *blocks, uint32_t n) {
  for (uint32_t i = 0; i < n; i++)
    if (!fx_alive(index, blocks[i])) return 0;
  return 1;
}

void fx_occupy(fx_index *index, uint32_t tier, uint32_t block, uint32_t slot) {
  fx_tier *to = &index->tier[tier];
  uint32_t parent = index->nodes[block].parent;
  to->slot[block] = slot;
  to->standing[block] = fx_unranked(block); /* not what an earlier block of that number was worth */
  to->resident++;
  index->masks[block].landing |= (uint8_t)(1u << tier);
  if (parent != FX_NONE && !to->kids[parent]++) {
    index->masks[parent].busy |= (uint8_t)(1u << tier);
    fx_index_settle(index, parent);
  }
}

/* The same for n neighbours of which each follows its parent. Only the first one's parent can leave an order by this:
 * the others were not READY in the tier. */
static void occupy_run(fx_index *index, uint32_t tier, uint32_t first, const uint32_t *slots, uint32_t n) {
  fx_tier *to = &index->tier[tier];
  uint8_t bit = (uint8_t)(1u << tier);
  fx_occupy(index, tier, first, slots[0]);
  memcpy(&to->slot[first], slots, n * sizeof *slots);
  uint32_t last = first + n - 1;
  for (uint32_t block = first; block < last; block++) {
    fx_mask *mask = &index->masks[block];
    to->standing[block] = fx_unranked(block);
    to->kids[block]++;
    mask->landing |= bit;
    mask->busy |= bit;
  }
  to->standing[last] = fx_unranked(last);
  index->masks[last].landing |= bit;
  to->resident += n - 1;
}

/* How many of the first blocks are neighbours that follow their parents and are ABSENT in the tiers of `bit`: 1 or
 * more, the first is not looked at. */
static uint32_t absent_run(const fx_index *index, const uint32_t *blocks, uint32_t n, unsigned bit) {
  uint32_t first = blocks[0], length = 1;
  for (; length < n && blocks[length] == first + length; length++) {
    fx_mask mask = index->masks[first + length];
    if (((mask.ready | mask.landing) & bit) || index->nodes[first + length].parent != first + length - 1) break;
  }
  return length;
}

int fx_index_land(fx_index *index, uint32_t tier, const uint32_t *blocks, const uint32_t *slots, uint32_t n) {
  unsigned bit = 1u << tier;
  for (uint32_t i = 0; i < n; i++) {
    if (!fx_alive(index, blocks[i])) return FX_INDEX_NO_BLOCK;
    if ((index->masks[blocks[i]].ready | index->masks[blocks[i]].landing) & bit) return FX_INDEX_STATE;
  }
  for (uint32_t i = 0, length; i < n; i += length) {
    if (index->masks[blocks[i]].landing & bit) return FX_INDEX_STATE;
    length = absent_run(index, blocks + i, n - i, bit);
    occupy_run(index, tier, blocks[i], slots + i, length);
  }
  return 0;
}

int fx_index_ready(fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n) {
  unsigned bit = 1u << tier;
  for (uint32_t i = 0; i < n; i++) {
    if (blocks[i] < index->max_blocks && (index->masks[blocks[i]].landing & bit)) continue;
    return fx_alive(index, blocks[i]) ? FX_INDEX_STATE : FX_INDEX_NO_BLOCK;
  }
  for (uint32_t i = 0; i < n; i++) {
    fx_mask *mask = &index->masks[blocks[i]];
    if (!(mask->landing & bit)) return FX_INDEX_STATE;
    mask->landing &= (uint8_t)~bit;
    mask->ready |= (uint8_t)bit;
    if (mask->ready != bit || !(mask->busy & bit)) fx_index_settle(index, blocks[i]); /* else no leaf anywhere */
  }
  return 0;
}

void fx_index_vacate(fx_index *index, uint32_t tier, uint32_t block) {
  fx_tier *from = &index->tier[tier];
  uint8_t keep = (uint8_t) ~(1u << tier);
  uint32_t parent = index->nodes[block].parent;
  index->masks[block].ready &= keep;
  index->masks[block].landing &= keep;
  from->resident--;
  fx_index_settle(index, block);
  if (parent != FX_NONE && !--from->kids[parent]) {
    index->masks[parent].busy &= keep;
    fx_index_settle(index, parent);
  }
}

/* Prune children before their parents, whichever way round a chain is given. */
static void prune_all(fx_index *index, const uint32_t *blocks, uint32_t n) {
  int leaves_first = n > 1 && fx_alive(index, blocks[0]) && index->nodes[blocks[0]].parent == blocks[1];
  for (uint32_t i = 0; i < n + FX_AHEAD; i++) {
    if (i < n) fx_prefetch_free(index, blocks[leaves_first ? i : n - 1 - i]);
    if (i < FX_AHEAD) continue;
    uint32_t at = i - FX_AHEAD, block = blocks[leaves_first ? at : n - 1 - at], next = FX_NONE;
    if (at + 1 < n) next = blocks[leaves_first ? at + 1 : n - 2 - at];
    if (fx_alive(index, block)) fx_prune(index, block, next);
  }
  fx_give_loose(index);
}

int fx_index_drop(fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, uint32_t *slots,
                  uint32_t *was_ready, uint32_t *n_ready) {
  unsigned bit = 1u << tier;
  uint32_t ready = 0;
  if (!all_alive(index, blocks, n)) return FX_INDEX_NO_BLOCK;
  for (uint32_t i = 0; i < n; i++) {
    fx_mask mask = index->masks[blocks[i]];
    slots[i] = (mask.ready | mask.landing) & bit ? index->tier[tier].slot[blocks[i]] : FX_NONE;
    if (mask.ready & bit) was_ready[ready++] = blocks[i];
    if (slots[i] != FX_NONE) fx_index_vacate(index, tier, blocks[i]);
  }
  prune_all(index, blocks, n);
  *n_ready = ready;
  return 0;
}

int fx_index_slots(const fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, uint32_t *slots) {
  unsigned bit = 1u << tier;
  for (uint32_t i = 0; i < n; i++) {
    if (!fx_alive(index, blocks[i])) return FX_INDEX_NO_BLOCK;
    fx_mask mask = index->masks[blocks[i]];
    slots[i] = (mask.ready | mask.landing) & bit ? index->tier[tier].slot[blocks[i]] : FX_NONE;
  }
  return 0;
}

int fx_index_states(const fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, uint8_t *states) {
  for (uint32_t i = 0; i < n; i++) {
    if (blocks[i] >= index->max_blocks) return FX_INDEX_NO_BLOCK;
    fx_mask mask = index->masks[blocks[i]]; /* all 0 in an entry that is gone */
    states[i] = (uint8_t)((mask.ready >> tier & 1) * 2 + (mask.landing >> tier & 1)); /* TierState */
  }
  return 0;
}

int64_t fx_index_select(const fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, uint32_t *ready) {
  uint32_t found = 0;
  for (uint32_t i = 0; i < n; i++) {
    if (!fx_known(index, blocks[i])) return FX_INDEX_NO_BLOCK;
    ready[found] = blocks[i];
    found += index->masks[blocks[i]].ready >> tier & 1;
  }
  return found;
}

uint32_t fx_index_all(const fx_index *index, uint32_t tier, uint32_t *blocks) {
  uint32_t found = 0;
  for (uint32_t block = 0; block < index->max_blocks; block++)
    if (fx_alive(index, block) && (index->masks[block].ready >> tier & 1)) blocks[found++] = block;
  return found;
}

int64_t fx_index_removable(const fx_index *index, const uint32_t *blocks, uint32_t n) {
  uint32_t found = 0;
  for (uint32_t i = n, own = FX_NONE; i-- > 0; own = blocks[i], found++) {
    if (!fx_alive(index, blocks[i])) return FX_INDEX_NO_BLOCK;
    const fx_node *node = &index->nodes[blocks[i]];
    uint32_t children = own != FX_NONE && index->nodes[own].parent == blocks[i];
    if (node->pins || (index->masks[blocks[i]].landing & ~index->foreign) || node->children != children) break;
  }
  return found;
}

/* Depth and block in one number, by which ancestors come first. */
static inline uint64_t place_of(const fx_index *index, uint32_t block) {
  return (uint64_t)index->nodes[block].depth << 32 | block;
}

static int by_place(const void *a, const void *b) {
  uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
  return (left > right) - (left < right);
}

static uint32_t each_once(uint64_t *places, uint32_t n) {
  uint32_t kept = 0;
  qsort(places, n, sizeof *places, by_place);
  for (uint32_t i = 0; i < n; i++)
    if (!kept || places[i] != places[kept - 1]) places[kept++] = places[i];
  return kept;
}

/* What of places[0..n) would be in `lower` without an ancestor goes behind the rest, which stays in order. */
static uint32_t part_alone(const fx_index *index, uint32_t lower, uint64_t *places, uint32_t n, uint64_t *alone) {
  uint32_t kept = 0, left = 0;
  for (uint32_t i = 0; i < n; i++) {
    uint32_t parent = index->nodes[(uint32_t)places[i]].parent;
    int with = parent == FX_NONE;
    if (!with) {
      fx_mask mask = index->masks[parent];
      uint64_t above = place_of(index, parent);
      with = (mask.ready | mask.landing) >> lower & 1 || (kept && bsearch(&above, places, kept, sizeof above, by_place));
    }
    if (with) places[kept++] = places[i];
    else alone[left++] = places[i];
  }
  memcpy(places + kept, alone, left * sizeof *alone);
  return left;
}

int64_t fx_index_lacking(const fx_index *index, uint32_t tier, uint32_t lower, const uint32_t *blocks, uint32_t n,
                         uint64_t *found, uint64_t *room, uint32_t limit, uint32_t *alone) {
  uint32_t count = 0, before = FX_NONE;
  for (uint32_t i = 0; i < n; i++) {
    if (!fx_alive(index, blocks[i])) return FX_INDEX_NO_BLOCK;
    fx_mask mask = index->masks[blocks[i]];
    if ((mask.ready | mask.landing) >> lower & 1) continue;
    uint32_t above = index->nodes[blocks[i]].parent;
    int follows = above != FX_NONE && above == before; /* its ancestors are found already */
    before = blocks[i];
    if (count == limit) count = each_once(found, count);
    found[count++] = place_of(index, blocks[i]);
    for (; !follows && above != FX_NONE; above = index->nodes[above].parent) {
      mask = index->masks[above];
      if (!(mask.ready >> tier & 1) || (mask.ready | mask.landing) >> lower & 1) break;
      if (count == limit) count = each_once(found, count);
      found[count++] = place_of(index, above);
    }
  }
  count = each_once(found, count);
  *alone = part_alone(index, lower, found, count, room);
  return count;
}

int64_t fx_index_stranded(const fx_index *index, uint32_t tier, const uint32_t *gone, uint32_t n, uint32_t limit,
                          uint32_t *blocks) {
  uint32_t count = 0, *left = malloc(index->max_blocks * sizeof *left); /* children there that stay, or FX_NONE: gone */
  if (!left) return FX_INDEX_MEMORY;
  memcpy(left, index->tier[tier].kids, index->max_blocks * sizeof *left);
  for (uint32_t i = 0; i < n; i++)
    if (index->nodes[gone[i]].parent != FX_NONE) left[index->nodes[gone[i]].parent]--;
  for (uint32_t i = 0; i < n; i++) left[gone[i]] = FX_NONE;
  for (uint32_t leaf = 0; leaf < index->max_blocks && count < limit; leaf++) {
    uint32_t block = leaf;
    while (!left[block] && count < limit && (index->masks[block].ready >> tier & 1) && !index->nodes[block].pins) {
      left[block] = FX_NONE;
      blocks[count++] = block;
      block = index->nodes[block].parent;
      if (block == FX_NONE) break;
      left[block]--;
    }
  }
  free(left);
  return count;
}

/* ---- pins ---- */

int fx_index_pin(fx_index *index, const uint32_t *blocks, uint32_t n) {
  if (!all_alive(index, blocks, n)) return FX_INDEX_NO_BLOCK;
  for (uint32_t i = 0; i < n; i++) {
    index->nodes[blocks[i]].pins++;
    if (index->masks[blocks[i]].queued) fx_index_settle(index, blocks[i]);
  }
  index->pinned += n;
  return 0;
}

int fx_index_unpin(fx_index *index, const uint32_t *blocks, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    if (!fx_alive(index, blocks[i])) return FX_INDEX_NO_BLOCK;
    if (!index->nodes[blocks[i]].pins) return FX_INDEX_PINS;
  }
  int bare = 0;
  for (uint32_t i = 0; i < n; i++) {
    fx_node *node = &index->nodes[blocks[i]];
    if (!node->pins) return FX_INDEX_PINS;
    node->pins--;
    index->pinned--;
    if (!node->pins) fx_index_settle(index, blocks[i]);
    bare |= fx_is_empty(index, blocks[i]);
  }
  if (bare) prune_all(index, blocks, n);
  return 0;
}

/* ---- holds ---- */

int fx_index_hold(fx_index *index, uint32_t tier, const uint32_t *blocks, uint32_t n, int on) {
  uint8_t bit = (uint8_t)(1u << tier);
  for (uint32_t i = 0; i < n; i++)
    if (blocks[i] >= index->max_blocks || (on && !fx_alive(index, blocks[i]))) return FX_INDEX_NO_BLOCK;
  for (uint32_t i = 0; i < n; i++) {
    if (!(index->held[blocks[i]] & bit) == !on) continue;
    index->held[blocks[i]] ^= bit;
    index->holds += on ? 1 : ~0ull;
    if (fx_alive(index, blocks[i])) fx_index_settle(index, blocks[i]);
  }
  return 0;
}

/* ---- what an entry is ---- */

int fx_index_keys(const fx_index *index, const uint32_t *blocks, uint32_t n, uint64_t *keys) {
  for (uint32_t i = 0; i < n; i++) {
    if (blocks[i] >= index->max_blocks) return FX_INDEX_NO_BLOCK;
    memcpy(keys + 2 * (size_t)i, &index->keys[blocks[i]], sizeof(fx_key));
  }
  return 0;
}

int fx_index_parents(const fx_index *index, const uint32_t *blocks, uint32_t n, uint32_t *parents) {
  if (!all_alive(index, blocks, n)) return FX_INDEX_NO_BLOCK;
  for (uint32_t i = 0; i < n; i++) parents[i] = index->nodes[blocks[i]].parent;
  return 0;
}

int fx_index_depths(const fx_index *index, const uint32_t *blocks, uint32_t n, uint32_t *depths) {
  if (!all_alive(index, blocks, n)) return FX_INDEX_NO_BLOCK;
  for (uint32_t i = 0; i < n; i++) depths[i] = index->nodes[blocks[i]].depth;
  return 0;
}
