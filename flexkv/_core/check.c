/* Full scan of the index for tests: every count, link and order is derived again and compared. */
#include <stdlib.h>
#include <string.h>

#include "index_impl.h"

static int by_number(const void *a, const void *b) {
  uint32_t left = *(const uint32_t *)a, right = *(const uint32_t *)b;
  return (left > right) - (left < right);
}

/* `top`: one past the last entry that is alive. */
static const char *check_entries(const fx_index *index, uint32_t *children, uint32_t *top) {
  uint32_t alive = 0, listed = 0;
  uint64_t pins = 0, holds = 0;
  *top = 0;
  for (uint32_t block = 0; block < index->max_blocks; block++) {
    if (!fx_alive(index, block)) {
      fx_mask mask = index->masks[block];
      if (index->held[block]) return "a dead entry is held";
      if (mask.ready | mask.landing | mask.queued) return "a dead entry has residency";
      continue;
    }
    holds += (uint64_t)__builtin_popcount(index->held[block]);
    const fx_node *node = &index->nodes[block];
    alive++;
    *top = block + 1;
    pins += node->pins;
    if (fx_child(index, node->parent, index->keys[block]) != block) return "a key does not find its entry";
    listed += !fx_unlisted(index, block, node->parent);
    if (node->parent == FX_NONE) {
      if (node->depth) return "a first block has a depth";
      continue;
    }
    if (!fx_alive(index, node->parent)) return "a parent is not an entry";
    if (node->depth != index->nodes[node->parent].depth + 1) return "a depth is not its parent's plus one";
    children[node->parent]++;
  }
  if (alive != index->count) return "the entry count is wrong";
  if (pins != index->pinned) return "the pin count is wrong";
  if (holds != index->holds) return "the count of holds is wrong";
  if (index->trials) return "a trial is open";
  if (index->loose_count || fx_runs_free(index->runs) != index->max_blocks - alive) return "entries leaked";
  for (uint32_t block = 0; block < *top; block++)
    if (fx_alive(index, block) && children[block] != index->nodes[block].children) return "a child count is wrong";
  uint64_t cells = 0;
  for (uint64_t at = 0; at <= index->table_mask; at++) cells += index->table[at] != FX_VACANT;
  return cells == listed ? NULL : "the table holds cells of dead entries";
}

static const char *check_residency(const fx_index *index, uint32_t top, uint32_t number, uint32_t *kids,
                                   uint32_t *slots) {
  const fx_tier *tier = &index->tier[number];
  uint32_t resident = 0;
  for (uint32_t block = 0; block < top; block++) {
    fx_mask mask = index->masks[block];
    if (!fx_alive(index, block)) continue;
    if (mask.ready & mask.landing) return "a block is READY and LANDING in one tier";
    if (!((mask.ready | mask.landing) >> number & 1)) continue;
    slots[resident++] = tier->slot[block];
    if (index->nodes[block].parent != FX_NONE) kids[index->nodes[block].parent]++;
  }
  if (resident != tier->resident) return "a resident count is wrong";
  qsort(slots, resident, sizeof *slots, by_number);
  for (uint32_t i = 1; i < resident; i++)
    if (slots[i] == slots[i - 1]) return "two blocks share a slot";
  for (uint32_t block = 0; block < top; block++) {
    if (!fx_alive(index, block)) continue;
    if (kids[block] != tier->kids[block]) return "a count of resident children is wrong";
    if ((index->masks[block].busy >> number & 1) != (kids[block] > 0)) return "a busy bit is wrong";
  }
  return NULL;
}

static int comes_before(fx_standing a, fx_standing b) {
  return a.rank < b.rank || (a.rank == b.rank && a.stamp < b.stamp);
}

static const char *check_list(const fx_index *index, uint32_t number, uint32_t *listed) {
  const fx_tier *tier = &index->tier[number];
  uint32_t before = FX_NONE;
  *listed = 0;
  for (uint32_t block = tier->first; block != FX_NONE; before = block, block = tier->spot[block].next) {
    if (!fx_alive(index, block) || !(index->masks[block].queued >> number & 1)) return "a list holds a stranger";
    if (tier->spot[block].prev != before) return "a list is torn";
    if (before != FX_NONE && !comes_before(tier->standing[before], tier->standing[block])) return "a list descends";
    if (++*listed > index->count) return "a list is endless";
  }
  return tier->last == before ? NULL : "a list ends elsewhere";
}

static const char *check_order(const fx_index *index, uint32_t top, uint32_t number) {
  const fx_tier *tier = &index->tier[number];
  uint32_t queued = 0, listed;
  const char *wrong = check_list(index, number, &listed);
  if (wrong) return wrong;
  for (uint32_t block = 0; block < top; block++) {
    if (!fx_alive(index, block)) continue;
    if (index->masks[block].queued != fx_evictable(index, block)) return "an order and the rule of eviction differ";
    if (!(index->masks[block].queued >> number & 1)) continue;
    queued++;
    if (tier->spot[block].next != FX_IN_HEAP) continue;
    uint32_t place = tier->spot[block].prev;
    if (place < FX_ROOT || place >= tier->end) return "a place lies outside its heap";
    if (memcmp(&tier->heap[place], &tier->standing[block], sizeof(fx_standing))) return "a heap holds an old rank";
    if (place > FX_ROOT && comes_before(tier->heap[place], tier->heap[place / 4 + 2])) return "a heap is not one";
  }
  return queued == listed + tier->end - FX_ROOT ? NULL : "an order holds blocks it should not";
}

const char *fx_index_check(const fx_index *index) {
  size_t n = index->max_blocks ? index->max_blocks : 1;
  uint32_t top = 0;
  uint32_t *children = calloc(n, sizeof *children), *slots = calloc(n, sizeof *slots);
  const char *wrong = children && slots ? fx_runs_check(index->runs) : "no memory for the check";
  if (!wrong) wrong = check_entries(index, children, &top);
  for (uint32_t tier = 0; tier < index->tiers && !wrong; tier++) {
    memset(children, 0, top * sizeof *children);
    wrong = check_residency(index, top, tier, children, slots);
    if (!wrong) wrong = check_order(index, top, tier);
  }
  free(children);
  free(slots);
  return wrong;
}

uint32_t fx_index_dump(const fx_index *index, uint64_t *keys, uint32_t *entries) {
  uint32_t count = 0, width = 2 + 2 * index->tiers;
  for (uint32_t block = 0; block < index->max_blocks; block++) {
    if (!fx_alive(index, block)) continue;
    memcpy(keys + 2 * count, &index->keys[block], sizeof(fx_key));
    uint32_t *entry = entries + (size_t)width * count++;
    entry[0] = block;
    entry[1] = index->nodes[block].parent;
    for (uint32_t tier = 0; tier < index->tiers; tier++) {
      fx_mask mask = index->masks[block];
      entry[2 + 2 * tier] = (mask.ready >> tier & 1) ? 2 : mask.landing >> tier & 1;
      entry[3 + 2 * tier] = index->tier[tier].slot[block];
    }
  }
  return count;
}
