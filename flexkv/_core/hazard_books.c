/* Entries, ghosts, runs, candidates and the LRU beside: the bookkeeping of hazard.c.
 *
 * An entry that follows its parent (parent + 1 == entry) is found from there; only the others are in the hash table.
 * Free entries are a stack: chains are forgotten deepest first, so they are taken again in ascending order. */
#include <stdlib.h>
#include <string.h>

#include "hazard_impl.h"

/* ---- entries ---- */

static inline int same(fx_name a, fx_name b) { return a.lo == b.lo && a.hi == b.hi; }

uint32_t fx_entry_find(const fx_hazard *h, uint32_t parent, fx_name name) {
  uint32_t guess = parent + 1; /* at most `limit`: a spare entry that is never in use */
  if (same(h->name[guess], name) && h->parent[guess] == parent) return guess;
  for (uint32_t at = (uint32_t)name.lo & h->table_mask;; at = (at + 1) & h->table_mask) {
    uint64_t cell = h->table[at];
    if (cell == ~0ull) return FX_NONE;
    if (cell >> 32 == (uint32_t)name.lo && same(h->name[(uint32_t)cell], name)) return (uint32_t)cell;
  }
}

uint32_t fx_entry_new(fx_hazard *h, uint32_t parent, fx_name name) {
  uint32_t entry = h->freed_count ? h->freed[--h->freed_count] : h->fresh++;
  h->name[entry] = name;
  h->parent[entry] = parent;
  h->depth[entry] = parent == FX_NONE ? 0 : h->depth[parent] + 1;
  h->kids[entry] = 0;
  h->uses[entry] = 0;
  h->flags[entry] = 0;
  h->block_of[entry] = FX_NONE;
  if (parent + 1 != entry) {
    uint32_t at = (uint32_t)name.lo & h->table_mask;
    while (h->table[at] != ~0ull) at = (at + 1) & h->table_mask;
    h->table[at] = (uint64_t)(uint32_t)name.lo << 32 | entry;
  }
  return entry;
}

/* Move later cells of the cluster back, so that no tombstones pile up. */
static void table_remove(fx_hazard *h, uint32_t entry) {
  uint32_t mask = h->table_mask, hole = (uint32_t)h->name[entry].lo & mask;
  while ((uint32_t)h->table[hole] != entry) hole = (hole + 1) & mask;
  for (uint32_t at = (hole + 1) & mask;; at = (at + 1) & mask) {
    uint64_t cell = h->table[at];
    if (cell == ~0ull) break;
    uint32_t home = (uint32_t)(cell >> 32) & mask;
    if (((at - home) & mask) < ((at - hole) & mask)) continue; /* its home lies behind the hole */
    h->table[hole] = cell;
    hole = at;
  }
  h->table[hole] = ~0ull;
}

static void forget(fx_hazard *h, uint32_t entry) {
  uint32_t block = h->block_of[entry];
  if (block != FX_NONE) h->entry_of[block] = FX_NONE;
  if (h->parent[entry] + 1 != entry) table_remove(h, entry);
  h->parent[entry] = FX_GONE;
  h->freed[h->freed_count++] = entry;
  fx_run_release(h, h->run_of[entry], 1);
}

/* ---- ghosts, oldest first; descendants before their ancestors ---- */

void fx_ghost_add(fx_hazard *h, uint32_t entry) {
  h->older[entry] = h->newest_ghost;
  h->newer[entry] = FX_NONE;
  *(h->newest_ghost == FX_NONE ? &h->oldest_ghost : &h->newer[h->newest_ghost]) = entry;
  h->newest_ghost = entry;
  h->ghosts++;
}

void fx_ghost_remove(fx_hazard *h, uint32_t entry) {
  uint32_t older = h->older[entry], newer = h->newer[entry];
  *(older == FX_NONE ? &h->oldest_ghost : &h->newer[older]) = newer;
  *(newer == FX_NONE ? &h->newest_ghost : &h->older[newer]) = older;
  h->ghosts--;
}

void fx_ghosts_trim(fx_hazard *h, uint32_t limit) {
  while (h->ghosts > limit) {
    uint32_t entry = h->oldest_ghost;
    fx_ghost_remove(h, entry);
    forget(h, entry);
  }
}

/* ---- runs ---- */

uint32_t fx_run_new(fx_hazard *h, uint32_t prompt, uint32_t class, uint32_t entries) {
  uint32_t number = h->free_run;
  if (number != FX_NONE)
    h->free_run = h->run[number].next;
  else
    number = h->runs_made++;
  uint32_t last = h->run[0].prev;
  h->run[number] = (fx_run){.last_use = h->now, .stamp = h->stamp, .entries = entries, .deepest = FX_NONE,
                            .prompt = prompt, .class = class, .spot = FX_NONE, .next = 0, .prev = last, .current = 1};
  h->run[last].next = h->run[0].prev = number;
  h->prompt[prompt].runs++;
  h->runs++;
  return number;
}

void fx_run_release(fx_hazard *h, uint32_t number, uint32_t entries) {
  fx_run *run = &h->run[number];
  run->entries -= entries;
  if (run->entries) return;
  fx_withdraw(h, number);
  fx_prompt_release(h, run->prompt);
  h->run[run->prev].next = run->next;
  h->run[run->next].prev = run->prev;
  run->next = h->free_run;
  h->free_run = number;
  h->runs--;
}

/* ---- candidates ---- */

void fx_price(fx_hazard *h, fx_candidates *of) {
  const fx_run *run = &h->run[of->run[0]];
  if (!fx_rates_learned(h->rates))
    of->value = 0.0; /* ties: the one used longest ago */
  else
    of->value = fx_rates_value(h->rates, run->class, fx_rates_bin(h->now - run->last_use));
  if (h->sabotage) of->value = -of->value;
}

static void put(fx_hazard *h, fx_candidates *of, uint32_t at, uint32_t run) {
  of->run[at] = run;
  h->run[run].spot = at;
}

static int before(const fx_hazard *h, uint32_t a, uint32_t b) { return h->run[a].stamp < h->run[b].stamp; }

static void rise(fx_hazard *h, fx_candidates *of, uint32_t at, uint32_t run) {
  for (; at && before(h, run, of->run[(at - 1) / 2]); at = (at - 1) / 2) put(h, of, at, of->run[(at - 1) / 2]);
  put(h, of, at, run);
}

static void sink(fx_hazard *h, fx_candidates *of, uint32_t at, uint32_t run) {
  for (uint32_t child; (child = 2 * at + 1) < of->count; at = child) {
    if (child + 1 < of->count && before(h, of->run[child + 1], of->run[child])) child++;
    if (!before(h, of->run[child], run)) break;
    put(h, of, at, of->run[child]);
  }
  put(h, of, at, run);
}

/* Without memory for its place a run is no candidate: others leave instead. */
void fx_offer(fx_hazard *h, uint32_t run) {
  uint32_t class = h->run[run].class;
  fx_candidates *of = &h->candidates[class];
  if (of->count == of->room) {
    uint32_t *more = realloc(of->run, (of->room + 8) * 2 * sizeof *more);
    if (!more) return;
    of->run = more;
    of->room = (of->room + 8) * 2;
  }
  if (!of->count) {
    of->active = h->active_count;
    h->active[h->active_count++] = class;
  }
  rise(h, of, of->count++, run);
  if (of->run[0] == run) fx_price(h, of);
}

void fx_withdraw(fx_hazard *h, uint32_t run) {
  uint32_t at = h->run[run].spot, class = h->run[run].class;
  if (at == FX_NONE) return;
  fx_candidates *of = &h->candidates[class];
  uint32_t last = of->run[--of->count];
  h->run[run].spot = FX_NONE;
  if (last != run && at && before(h, last, of->run[(at - 1) / 2]))
    rise(h, of, at, last);
  else if (last != run)
    sink(h, of, at, last);
  if (!of->count) {
    uint32_t moved = h->active[--h->active_count];
    h->active[of->active] = moved;
    h->candidates[moved].active = of->active;
  } else if (!at) {
    fx_price(h, of);
  }
}

/* ---- prompts, and the LRU beside: what each keeps of its own path, the oldest prompt first ---- */

uint32_t fx_prompt_new(fx_hazard *h) {
  uint32_t number = h->free_prompt;
  if (number != FX_NONE)
    h->free_prompt = h->prompt[number].next;
  else
    number = h->prompts_made++;
  h->prompt[number] = (fx_prompt){.runs = 1, .next = FX_NONE, .prev = FX_NONE}; /* 1: until its runs are made */
  return number;
}

/* Take a prompt that keeps nothing out of the LRU. */
static void lru_leave(fx_hazard *h, uint32_t number) {
  fx_prompt *prompt = &h->prompt[number];
  if (prompt->next == FX_NONE) return;
  h->prompt[prompt->prev].next = prompt->next;
  h->prompt[prompt->next].prev = prompt->prev;
  prompt->next = prompt->prev = FX_NONE;
  prompt->low = prompt->high = 0;
}

void fx_prompt_release(fx_hazard *h, uint32_t number) {
  fx_prompt *prompt = &h->prompt[number];
  if (--prompt->runs) return;
  if (prompt->next != FX_NONE) { /* nothing is known of its blocks any more */
    h->lru_used -= prompt->high - prompt->low;
    lru_leave(h, number);
  }
  prompt->next = h->free_prompt;
  h->free_prompt = number;
}

/* The LRU serves the path: it takes `known` entries over from earlier prompts and, if `insert`, comes to keep all n.
 * Returns its hits. */
uint32_t fx_lru_use(fx_hazard *h, uint32_t number, uint32_t known, uint32_t n, int insert) {
  uint32_t hits = 0, missed = 0;
  for (uint32_t i = 0, end; i < known; i = end) {
    uint32_t owner = h->run[h->run_of[h->path[i]]].prompt;
    fx_prompt *from = &h->prompt[owner];
    for (end = i + 1; end < known && h->run[h->run_of[h->path[end]]].prompt == owner;) end++;
    uint32_t kept = from->high < end ? from->high : end;
    kept = kept > i ? kept - i : 0;
    if (!missed) hits += kept;
    missed |= kept < end - i;
    h->lru_used -= kept;
    from->low = end;
    if (from->low >= from->high) lru_leave(h, owner);
  }
  fx_prompt *mine = &h->prompt[number];
  mine->high = insert ? (n < h->capacity ? n : h->capacity) : hits;
  if (!mine->high) return hits;
  mine->prev = h->prompt[0].prev;
  mine->next = 0;
  h->prompt[mine->prev].next = h->prompt[0].prev = number;
  h->lru_used += mine->high;
  while (h->lru_used > h->capacity) {
    uint32_t oldest = h->prompt[0].next, over = h->lru_used - h->capacity;
    fx_prompt *from = &h->prompt[oldest];
    uint32_t some = from->high - from->low < over ? from->high - from->low : over;
    from->high -= some;
    h->lru_used -= some;
    if (from->low >= from->high) lru_leave(h, oldest);
  }
  return hits;
}
