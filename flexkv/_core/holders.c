/* Who holds what on other machines: rows by key, their holders, and how both come and go. See holders.h. */
#define _GNU_SOURCE
#include "holders.h"

#include <stdlib.h>
#include <string.h>

#include "index_impl.h"
#include "pages.h"

typedef struct {
  uint32_t block;
  uint32_t held; /* holders */
} row;

struct fx_holders {
  fx_index *index;
  uint32_t tier, rows;
  uint8_t bit;
  row *row; /* block FX_NONE: not in use */
  fx_holding *holding; /* FX_HOLDERS per row, used ones first */
  uint32_t *left; /* a ring of rows that are to be given back */
  uint32_t left_start, left_count;
  uint32_t *counts;
  void *memory;
  size_t memory_bytes;
};

static size_t lay_out(fx_holders *holders, char *base) {
  size_t n = holders->rows, at = 0;
  holders->row = (row *)base;
  at += n * sizeof(row);
  holders->holding = (fx_holding *)(base + at);
  at += n * FX_HOLDERS * sizeof(fx_holding);
  holders->left = (uint32_t *)(base + at);
  at += n * sizeof(uint32_t);
  holders->counts = (uint32_t *)(base + at);
  return at + (FX_NOBODY + 1) * sizeof(uint32_t);
}

void fx_holders_clear(fx_holders *holders) {
  for (uint32_t i = 0; i < holders->rows; i++) holders->row[i] = (row){.block = FX_NONE};
  memset(holders->counts, 0, (FX_NOBODY + 1) * sizeof *holders->counts);
  holders->left_start = holders->left_count = 0;
}

fx_holders *fx_holders_open(fx_index *index, uint32_t tier, uint32_t rows) {
  fx_holders *holders = index->every_key ? calloc(1, sizeof *holders) : NULL;
  if (!holders) return NULL;
  holders->index = index;
  holders->tier = tier;
  holders->bit = (uint8_t)(1u << tier);
  holders->rows = rows;
  holders->memory_bytes = lay_out(holders, NULL);
  holders->memory = fx_pages_map(holders->memory_bytes);
  if (!holders->memory) {
    free(holders);
    return NULL;
  }
  lay_out(holders, holders->memory);
  fx_holders_clear(holders);
  index->foreign |= holders->bit;
  return holders;
}

void fx_holders_close(fx_holders *holders) {
  if (!holders) return;
  fx_pages_unmap(holders->memory, holders->memory_bytes);
  free(holders);
}

const uint32_t *fx_holders_counts(const fx_holders *holders) { return holders->counts; }

static int has_row(const fx_holders *holders, uint32_t block) {
  fx_mask mask = holders->index->masks[block];
  return (mask.ready | mask.landing) & holders->bit;
}

static uint32_t row_of(const fx_holders *holders, uint32_t block) {
  return holders->index->tier[holders->tier].slot[block];
}

/* The row of a key, or FX_NONE. */
static uint32_t find(const fx_holders *holders, fx_key key) {
  uint32_t block = fx_lookup(holders->index, key);
  return block != FX_NONE && has_row(holders, block) ? row_of(holders, block) : FX_NONE;
}

static void prefetch(const fx_holders *holders, const fx_key *keys, uint32_t at, uint32_t n) {
  if (at < n) __builtin_prefetch(&holders->index->table[(uint32_t)keys[at].lo & holders->index->table_mask], 1);
}

/* ---- holders of a row ---- */

/* 0 when there is no room. */
static int hold(fx_holders *holders, uint32_t number, uint32_t who, uint8_t media) {
  row *in = &holders->row[number];
  fx_holding *held = &holders->holding[(size_t)number * FX_HOLDERS];
  for (uint32_t i = 0; i < in->held; i++) {
    if (held[i].who != who) continue;
    held[i].media |= media;
    return 1;
  }
  if (in->held == FX_HOLDERS) return 0;
  held[in->held++] = (fx_holding){.who = (uint16_t)who, .media = media};
  holders->counts[who]++;
  return 1;
}

/* Take media off the i-th holder, and the holder off the row when none is left. Returns whether it is gone. */
static int let_go(fx_holders *holders, uint32_t number, uint32_t i, uint8_t media) {
  row *in = &holders->row[number];
  fx_holding *held = &holders->holding[(size_t)number * FX_HOLDERS];
  held[i].media &= (uint8_t)~media;
  if (held[i].media) return 0;
  holders->counts[held[i].who]--;
  held[i] = held[--in->held];
  return 1;
}

/* ---- leaving ---- */

static void give_up(fx_holders *holders, uint32_t number) {
  holders->left[(holders->left_start + holders->left_count++) % holders->rows] = number;
}

/* A row without holders leaves, unless it has children here; with it ancestors that stayed for its sake. Whoever calls
 * this gives loose entries back. */
static void fade(fx_holders *holders, uint32_t number) {
  fx_index *index = holders->index;
  uint32_t block = holders->row[number].block;
  if (index->tier[holders->tier].kids[block]) {
    index->masks[block].ready &= (uint8_t)~holders->bit;
    index->masks[block].landing |= holders->bit;
    fx_index_settle(index, block);
    return;
  }
  for (;;) {
    uint32_t parent = index->nodes[block].parent;
    give_up(holders, number);
    fx_index_vacate(index, holders->tier, block);
    fx_prune(index, block, FX_NONE);
    if (parent == FX_NONE || !(index->masks[parent].landing & holders->bit)) break;
    if (index->tier[holders->tier].kids[parent]) break;
    block = parent;
    number = row_of(holders, block);
  }
}

uint32_t fx_holders_part(fx_holders *holders, uint32_t who, const uint64_t *words, const uint8_t *media, uint32_t n) {
  const fx_key *keys = (const fx_key *)words;
  uint32_t parted = 0;
  for (uint32_t i = 0; i < n; i++) {
    prefetch(holders, keys, i + FX_AHEAD, n);
    uint32_t number = find(holders, keys[i]);
    if (number == FX_NONE) continue;
    const fx_holding *held = &holders->holding[(size_t)number * FX_HOLDERS];
    for (uint32_t j = 0; j < holders->row[number].held; j++) {
      if (held[j].who != who) continue;
      parted++;
      if (let_go(holders, number, j, media[i]) && !holders->row[number].held) fade(holders, number);
      break;
    }
  }
  fx_give_loose(holders->index);
  return parted;
}

uint32_t fx_holders_forget(fx_holders *holders, const uint32_t *blocks, uint32_t n) {
  fx_index *index = holders->index;
  uint32_t found = 0;
  for (uint32_t i = 0; i < n; i++) {
    if (i + FX_AHEAD < n) fx_prefetch_free(index, blocks[i + FX_AHEAD]);
    if (!fx_alive(index, blocks[i]) || !has_row(holders, blocks[i])) continue;
    uint32_t number = row_of(holders, blocks[i]);
    if (!holders->row[number].held) continue;
    while (holders->row[number].held) let_go(holders, number, 0, 0xFF);
    fade(holders, number);
    found++;
  }
  fx_give_loose(index);
  return found;
}

uint32_t fx_holders_sweep(fx_holders *holders, const uint8_t *gone, uint32_t from, uint32_t rows, uint32_t limit) {
  uint32_t left = 0, number = from;
  for (; number < holders->rows && number - from < rows && left < limit; number++) {
    const fx_holding *held = &holders->holding[(size_t)number * FX_HOLDERS];
    if (!holders->row[number].held) continue;
    for (uint32_t i = holders->row[number].held; i-- > 0;)
      if (held[i].media & gone[held[i].who]) let_go(holders, number, i, gone[held[i].who]);
    if (holders->row[number].held) continue;
    fade(holders, number);
    left++;
  }
  fx_give_loose(holders->index);
  return number < holders->rows ? number : 0;
}

uint32_t fx_holders_waiting(const fx_holders *holders) { return holders->left_count; }

uint32_t fx_holders_collect(fx_holders *holders, uint32_t *slots, uint32_t limit) {
  const fx_index *index = holders->index;
  uint32_t found = 0;
  if (limit > holders->left_count) limit = holders->left_count;
  while (limit--) {
    uint32_t number = holders->left[holders->left_start];
    const row *out = &holders->row[number];
    holders->left_start = (holders->left_start + 1) % holders->rows;
    holders->left_count--;
    if (fx_alive(index, out->block) && index->nodes[out->block].pins) {
      holders->left[(holders->left_start + holders->left_count++) % holders->rows] = number;
      continue;
    }
    holders->row[number].block = FX_NONE;
    slots[found++] = number;
  }
  return found;
}

/* ---- coming ---- */

void fx_holders_join(fx_holders *holders, uint32_t who, const uint64_t *words, const uint64_t *above,
                     const uint8_t *media, uint32_t n, uint32_t *blocks, uint32_t *missing, uint32_t *counts) {
  const fx_key *keys = (const fx_key *)words, *parents = (const fx_key *)above;
  fx_index *index = holders->index;
  uint32_t found = 0, lacking = 0, crowded = 0;
  for (uint32_t i = 0; i < n; i++) {
    prefetch(holders, keys, i + FX_AHEAD, n);
    uint32_t number = find(holders, keys[i]);
    if (number == FX_NONE) {
      missing[lacking++] = i;
      if (i && fx_same(parents[i], keys[i - 1])) continue;
      number = find(holders, parents[i]);
      if (number != FX_NONE) blocks[found++] = holders->row[number].block;
      continue;
    }
    uint32_t block = holders->row[number].block;
    if (!hold(holders, number, who, media[i]))
      crowded++;
    else if (index->masks[block].landing & holders->bit)
      fx_index_ready(index, holders->tier, &block, 1);
    blocks[found++] = block;
  }
  counts[0] = found;
  counts[1] = lacking;
  counts[2] = crowded;
}

static const fx_key ROOT = {0, 0};

/* The entry below which a block belongs; 0 when that has no row. */
static int parent_of(const fx_holders *holders, fx_key key, uint32_t *parent) {
  *parent = FX_NONE;
  if (fx_same(key, ROOT)) return 1;
  uint32_t number = find(holders, key);
  if (number == FX_NONE) return 0;
  *parent = holders->row[number].block;
  return 1;
}

/* How many of these positions go on as one chain of neighbours from the first. */
static uint32_t chain_of(const fx_key *keys, const fx_key *parents, const uint32_t *at, uint32_t n) {
  uint32_t length = 1;
  while (length < n && at[length] == at[0] + length && fx_same(parents[at[length]], keys[at[length] - 1])) length++;
  return length;
}

/* Chain new entries below `parent`, up to a key that has one. Returns how many. */
static uint32_t add_chain(fx_index *index, const fx_key *keys, uint32_t n, uint32_t parent, uint32_t *blocks) {
  uint32_t added = 0, room = fx_runs_free(index->runs), above = parent;
  if (n > room) n = room;
  fx_runs_take(index->runs, n, parent == FX_NONE ? FX_NONE : parent + 1, blocks);
  for (; added < n && fx_lookup(index, keys[added]) == FX_NONE; above = blocks[added++])
    fx_entry_add(index, blocks[added], keys[added], above);
  fx_runs_give(index->runs, blocks + added, n - added);
  if (added && parent != FX_NONE) fx_index_settle(index, parent);
  return added;
}

int64_t fx_holders_add(fx_holders *holders, uint32_t who, const uint64_t *words, const uint64_t *above,
                       const uint8_t *media, const uint32_t *at, uint32_t n, const uint32_t *slots, uint32_t *blocks,
                       uint32_t *orphans) {
  const fx_key *keys = (const fx_key *)words, *parents = (const fx_key *)above;
  fx_index *index = holders->index;
  uint32_t made = 0, length;
  int code = 0;
  *orphans = 0;
  for (uint32_t i = 0; i < n && !code; i += length) {
    uint32_t parent, block = fx_lookup(index, keys[at[i]]);
    length = 1;
    if (block != FX_NONE && has_row(holders, block)) { /* the same key once more */
      hold(holders, row_of(holders, block), who, media[at[i]]);
      continue;
    }
    /* no parent, or somebody lies about it */
    if (!parent_of(holders, parents[at[i]], &parent) || (block != FX_NONE && index->nodes[block].parent != parent)) {
      ++*orphans;
      continue;
    }
    uint32_t *fresh = blocks + made;
    *fresh = block;
    if (block == FX_NONE)
      length = add_chain(index, keys + at[i], chain_of(keys, parents, at + i, n - i), parent, fresh);
    if (!length) break; /* no entry is free */
    code = fx_index_land(index, holders->tier, fresh, slots + made, length);
    if (!code) code = fx_index_ready(index, holders->tier, fresh, length);
    for (uint32_t j = 0; j < length; j++, made++) {
      holders->row[slots[made]].block = blocks[made];
      hold(holders, slots[made], who, media[at[i + j]]);
    }
  }
  return code ? code : (int64_t)made;
}

/* ---- asking ---- */

static uint32_t lowest(uint8_t media) { return (uint32_t)__builtin_ctz(media); }

static void insert_sorted(fx_holding *found, uint32_t count, fx_holding holding) {
  uint32_t i = count;
  for (; i && found[i - 1].media > holding.media; i--) found[i] = found[i - 1];
  found[i] = holding;
}

void fx_holders_of(const fx_holders *holders, const uint32_t *slots, uint32_t n, const uint16_t *numbers,
                   const uint8_t *gone, uint32_t shared, fx_holding *found) {
  for (uint32_t i = 0; i < n; i++, found += FX_HOLDERS) {
    uint32_t count = 0, sharer = FX_NOBODY;
    for (uint32_t j = 0; j < FX_HOLDERS; j++) found[j] = (fx_holding){.who = FX_NOBODY};
    if (slots[i] >= holders->rows || holders->row[slots[i]].block == FX_NONE) continue;
    const fx_holding *held = &holders->holding[(size_t)slots[i] * FX_HOLDERS];
    for (uint32_t j = 0; j < holders->row[slots[i]].held; j++) {
      uint8_t media = held[j].media & (uint8_t)~gone[held[j].who];
      if (!media) continue;
      uint32_t medium = lowest(media);
      if (medium != shared && (media >> shared & 1)) sharer = numbers[held[j].who];
      insert_sorted(found, count++, (fx_holding){.who = numbers[held[j].who], .media = (uint8_t)medium});
    }
    if (sharer != FX_NOBODY && count < FX_HOLDERS)
      insert_sorted(found, count, (fx_holding){.who = (uint16_t)sharer, .media = (uint8_t)shared});
  }
}

static const char *check_row(const fx_holders *holders, uint32_t number) {
  const fx_index *index = holders->index;
  const row *in = &holders->row[number];
  fx_mask mask = index->masks[in->block];
  if (!fx_alive(index, in->block)) return "a row's block is gone";
  if (!((in->held ? mask.ready : mask.landing) & holders->bit)) return "a row's state is not that of its holders";
  if (!in->held && !index->tier[holders->tier].kids[in->block]) return "a row stays for nobody";
  uint32_t parent = index->nodes[in->block].parent;
  return parent == FX_NONE || has_row(holders, parent) ? NULL : "a parent has no row";
}

const char *fx_holders_check(const fx_holders *holders) {
  uint32_t used = 0;
  for (uint32_t number = 0; number < holders->rows; number++) {
    const row *in = &holders->row[number];
    if (in->block == FX_NONE || !has_row(holders, in->block) || row_of(holders, in->block) != number) {
      if (in->held) return "a row that is not in use has holders";
      continue;
    }
    used++;
    const char *wrong = check_row(holders, number);
    if (wrong) return wrong;
  }
  return used == holders->index->tier[holders->tier].resident ? NULL : "rows and residents differ";
}
