#include "hazard.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hazard_impl.h"

/* The guard: blocks by which the learned order must be ahead before it is followed, and behind before it is left. */
#define FX_AHEAD_PROMPTS 2.0 /* mean prompts */
#define FX_AHEAD_SHARE 0.001 /* of the capacity */
#define FX_BEHIND_PROMPTS 5.0 /* at first; twice that after FX_TRUST prompts in its favour */
#define FX_TRUST 2048.0
#define FX_BEHIND_SHARE 0.01
#define FX_WARM 300u /* prompts before anything but LRU is followed */
#define FX_LOOK 1024u /* blocks of the tier to look at per prompt after following began */

/* ---- life ---- */

static void *reserve(fx_hazard *h, size_t count, size_t size) {
  h->memory_bytes += count * size;
  return calloc(count, size);
}

static void empty(fx_hazard *h) {
  memset(h->parent, 0xFE, (h->fresh + 1) * sizeof *h->parent);
  memset(h->table, 0xFF, ((size_t)h->table_mask + 1) * sizeof *h->table);
  memset(h->entry_of, 0xFF, ((size_t)h->max_blocks + 1) * sizeof *h->entry_of);
  while (h->active_count) {
    fx_candidates *of = &h->candidates[h->active[--h->active_count]];
    of->count = 0;
  }
  h->fresh = h->freed_count = h->ghosts = h->used = h->lru_used = h->runs = 0;
  h->oldest_ghost = h->newest_ghost = h->free_run = h->free_prompt = FX_NONE;
  h->runs_made = h->prompts_made = 1;
  h->run[0] = (fx_run){0};
  h->prompt[0] = (fx_prompt){.runs = 1};
  h->length = h->known = h->unwanted_count = h->shared = 0;
}

fx_hazard *fx_hazard_open(uint32_t capacity, uint32_t max_blocks, int sabotage) {
  fx_hazard *h = calloc(1, sizeof *h);
  if (!h) return NULL;
  h->capacity = capacity;
  h->max_blocks = max_blocks;
  h->sabotage = sabotage;
  size_t limit = (size_t)capacity * (1 + 2 * FX_GHOSTS) + 1; /* held, ghosts, and a prompt as long as all ghosts */
  if (limit < 0x80000000u) {
    h->limit = h->fresh = (uint32_t)limit;
    size_t cells = 64;
    while (cells < limit) cells *= 2;
    h->table_mask = (uint32_t)cells - 1;
    h->name = reserve(h, limit + 1, sizeof *h->name);
    uint32_t **columns[] = {&h->parent, &h->depth, &h->run_of, &h->kids, &h->block_of,
                            &h->newer,  &h->older, &h->freed,  &h->path};
    int whole = h->name != NULL;
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++)
      whole &= (*columns[i] = reserve(h, limit + 1, sizeof(uint32_t))) != NULL;
    whole &= (h->uses = reserve(h, limit, 1)) != NULL && (h->flags = reserve(h, limit, 1)) != NULL;
    whole &= (h->table = reserve(h, cells, sizeof *h->table)) != NULL;
    whole &= (h->run = reserve(h, limit + 1, sizeof *h->run)) != NULL;
    whole &= (h->fresh_runs = reserve(h, limit + 1, sizeof *h->fresh_runs)) != NULL;
    whole &= (h->prompt = reserve(h, limit + 2, sizeof *h->prompt)) != NULL;
    whole &= (h->candidates = reserve(h, fx_rates_limit(), sizeof *h->candidates)) != NULL;
    whole &= (h->active = reserve(h, fx_rates_limit(), sizeof *h->active)) != NULL;
    whole &= (h->entry_of = reserve(h, (size_t)max_blocks + 1, sizeof *h->entry_of)) != NULL;
    whole &= (h->here = reserve(h, (size_t)max_blocks + 1, 1)) != NULL;
    whole &= (h->unwanted = reserve(h, (size_t)max_blocks + 1, sizeof *h->unwanted)) != NULL;
    if (whole && (h->rates = fx_rates_open())) {
      empty(h);
      return h;
    }
  }
  fx_hazard_close(h);
  return NULL;
}

void fx_hazard_close(fx_hazard *h) {
  if (!h) return;
  if (h->candidates)
    for (uint32_t i = 0; i < fx_rates_limit(); i++) free(h->candidates[i].run);
  fx_rates_close(h->rates);
  void *all[] = {h->name,  h->parent, h->depth, h->run_of,     h->kids,   h->block_of,
                 h->newer, h->older,  h->freed, h->path, 
                 h->uses,  h->flags,  h->table,      h->run,    h->fresh_runs, h->prompt, h->candidates, h->active,
                 h->entry_of, h->here, h->unwanted};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
  free(h);
}

void fx_hazard_clear(fx_hazard *h) {
  empty(h);
  memset(h->here, 0, h->max_blocks);
}

/* ---- what a use of the path teaches, and the runs that it makes ---- */

/* The first `known` entries of the path leave their runs (and the ghosts). What is used the second time by a put, after
 * it was read for the same request, teaches nothing new. */
static void learn(fx_hazard *h, uint32_t held, int by_put) {
  for (uint32_t i = 0, end; i < h->known; i = end) {
    uint32_t number = h->run_of[h->path[i]];
    fx_run *run = &h->run[number];
    for (end = i + 1; end < h->known && h->run_of[h->path[end]] == number;) end++;
    if (!(by_put && run->read_only)) {
      uint32_t bin = fx_rates_bin(h->now - run->last_use);
      fx_rates_reused(h->rates, run->class, bin, end - i);
      if (bin >= run->next_bin) fx_rates_entered(h->rates, run->class, run->next_bin, bin, end - i);
      for (uint32_t at = i; at < end; at++) h->uses[h->path[at]] += h->uses[h->path[at]] < 255;
    }
    uint32_t mine = end < held ? end : held;
    if (mine > i) run->held -= mine - i;
    if (!run->held) fx_withdraw(h, number);
    fx_run_release(h, number, end - i);
  }
  for (uint32_t i = held; i < h->known; i++) fx_ghost_remove(h, h->path[i]);
}

static uint32_t uses_class(uint32_t uses) {
  static const uint8_t small[] = {0, 1, 2, 3, 3, 4, 4, 4, 4};
  return uses < sizeof small ? small[uses] : uses < 17 ? 5 : 6;
}

static uint32_t halvings(uint64_t value) { return value ? 63u - (uint32_t)__builtin_clzll(value) : 0; }

/* Cut the path where the number of uses changes class, and classify the pieces; see docs/hazard.md for the traits. */
static uint32_t make_runs(fx_hazard *h, uint32_t prompt, int continues, int64_t answer, int by_put) {
  uint32_t n = h->length, known = h->known, made = 0;
  uint32_t share = known <= 1 ? 0 : 2 * known < n ? 1 : 2;
  uint32_t kind = !known ? 0 : continues ? 3 : known == 1 ? 1 : 2;
  uint32_t news = n - known > 4, size = n < 4 ? 0 : n < 16 ? 1 : n < 64 ? 2 : 3;
  for (uint32_t i = 0, end; i < n; i = end) {
    uint32_t uses = uses_class(h->uses[h->path[i]]);
    for (end = i + 1; end < n && uses_class(h->uses[h->path[end]]) == uses;) end++;
    uint32_t base = (i < known) | share << 1 | (end == n) << 3 | (i < 2) << 4;
    uint32_t class = fx_rates_class(h->rates, 0, base);
    class = fx_rates_class(h->rates, class, news | kind << 1);
    class = fx_rates_class(h->rates, class, size);
    if (answer >= 0) {
      uint32_t level = halvings((uint64_t)answer + 1) / 2;
      class = fx_rates_class(h->rates, class, level < 7 ? level : 7);
    }
    uint32_t number = fx_run_new(h, prompt, class, end - i);
    h->run[number].read_only = (uint8_t)!by_put;
    for (uint32_t at = i; at < end; at++) h->run_of[h->path[at]] = number;
    fx_rates_began(h->rates, end - i);
    h->fresh_runs[made++] = number;
  }
  return made;
}

/* ---- who leaves, who comes ---- */

static void let_go(fx_hazard *h, uint32_t entry) {
  if (fx_is_shared(h, entry)) {
    h->shared--;
    if (h->following && h->unwanted_count < h->max_blocks) h->unwanted[h->unwanted_count++] = h->block_of[entry];
  }
  h->flags[entry] &= (uint8_t)~FX_HELD;
  fx_ghost_add(h, entry);
  h->used--;
}

/* Evict up to `want` entries from the end of a run. */
static uint32_t shorten(fx_hazard *h, uint32_t number, uint32_t want) {
  fx_run *run = &h->run[number];
  uint32_t gone = 0;
  while (gone < want) {
    uint32_t entry = run->deepest, parent = h->parent[entry];
    let_go(h, entry);
    run->held--;
    gone++;
    uint32_t kids = parent == FX_NONE ? 1 : --h->kids[parent];
    if (!run->held) {
      fx_withdraw(h, number);
      uint32_t above = kids ? FX_NONE : h->run_of[parent];
      if (above != FX_NONE && fx_is_held(h, parent) && !h->run[above].current) fx_offer(h, above);
      break;
    }
    run->deepest = parent;
    if (kids) {
      fx_withdraw(h, number);
      break;
    }
  }
  return gone;
}

/* Evict up to `want` entries that are worth less than a newcomer. */
static uint32_t make_room(fx_hazard *h, double newcomer, uint32_t want) {
  uint32_t gone = 0;
  while (gone < want && h->active_count) {
    const fx_candidates *worst = &h->candidates[h->active[0]];
    for (uint32_t i = 1; i < h->active_count; i++) {
      const fx_candidates *of = &h->candidates[h->active[i]];
      if (of->value > worst->value) continue;
      if (of->value < worst->value || h->run[of->run[0]].stamp < h->run[worst->run[0]].stamp) worst = of;
    }
    if (worst->value > newcomer) break;
    gone += shorten(h, worst->run[0], want - gone);
  }
  return gone;
}

/* Hold as much of the path as there is room, or worse entries, for; returns how many of its blocks are held. */
static uint32_t admit(fx_hazard *h, uint32_t held) {
  uint32_t goal = h->length < h->capacity ? h->length : h->capacity;
  if (h->capacity - h->used < goal - held)
    for (uint32_t i = 0; i < h->active_count; i++) fx_price(h, &h->candidates[h->active[i]]);
  while (held < goal) {
    uint32_t number = h->run_of[h->path[held]], end = held;
    while (end < goal && h->run_of[h->path[end]] == number) end++;
    uint32_t room = h->capacity - h->used, want = end - held;
    if (room < want) {
      double value = fx_rates_value(h->rates, h->run[number].class, 0);
      room += make_room(h, fx_rates_learned(h->rates) && !h->sabotage ? value : HUGE_VAL, want - room);
    }
    uint32_t some = room < want ? room : want;
    for (uint32_t i = held; i < held + some; i++) {
      h->flags[h->path[i]] |= FX_HELD;
      h->shared += (uint32_t)fx_is_shared(h, h->path[i]);
      if (i) h->kids[h->path[i - 1]]++;
    }
    h->used += some;
    held += some;
    if (some < want) break;
  }
  return held;
}

/* What is not held becomes a ghost, the end first; the new runs may be evicted from now on. */
static void settle(fx_hazard *h, uint32_t held, uint32_t made) {
  for (uint32_t i = h->length; i-- > held;) fx_ghost_add(h, h->path[i]);
  for (uint32_t i = 0, at = 0; i < made; i++) {
    fx_run *run = &h->run[h->fresh_runs[i]];
    run->current = 0;
    if (at >= held) continue;
    run->held = run->entries < held - at ? run->entries : held - at;
    run->deepest = h->path[at + run->held - 1];
    at += run->entries;
  }
  if (held && !h->kids[h->path[held - 1]]) fx_offer(h, h->run_of[h->path[held - 1]]);
  fx_ghosts_trim(h, FX_GHOSTS * h->capacity);
}

/* Count the age bins that some runs have entered unused since they were looked at: all of them in a hundred prompts. */
static void sweep(fx_hazard *h) {
  for (uint32_t some = h->runs / 100 + 1; some && h->runs; some--) {
    uint32_t number = h->run[0].next, last = h->run[0].prev;
    fx_run *run = &h->run[number];
    uint32_t bin = fx_rates_bin(h->now - run->last_use);
    if (bin >= run->next_bin) {
      fx_rates_entered(h->rates, run->class, run->next_bin, bin, run->entries);
      run->next_bin = (uint8_t)(bin + 1);
    }
    if (number == last) break;
    h->run[0].next = run->next;
    h->run[run->next].prev = 0;
    run->prev = last;
    run->next = 0;
    h->run[last].next = h->run[0].prev = number;
  }
}

/* ---- the guard ---- */

/* The model comes to hold what the LRU beside holds, which is what the tier holds: so both go on from the same blocks.
 * It costs a look at every entry, and is done whenever following begins. */
static void start_from_lru(fx_hazard *h) {
  while (h->active_count) shorten(h, h->candidates[h->active[0]].run[0], FX_NONE);
  for (uint32_t entry = 0; entry < h->fresh; entry++) {
    if (!fx_in_use(h, entry)) continue;
    fx_run *run = &h->run[h->run_of[entry]];
    uint32_t depth = h->depth[entry], parent = h->parent[entry];
    if (depth < h->prompt[run->prompt].low || depth >= h->prompt[run->prompt].high) continue;
    fx_ghost_remove(h, entry);
    h->flags[entry] |= FX_HELD;
    h->shared += (uint32_t)fx_is_shared(h, entry);
    h->used++;
    if (parent != FX_NONE) h->kids[parent]++;
    if (!run->held++ || depth > h->depth[run->deepest]) run->deepest = entry;
  }
  for (uint32_t number = h->run[0].next; number; number = h->run[number].next)
    if (h->run[number].held && !h->kids[h->run[number].deepest]) fx_offer(h, number);
  fx_ghosts_trim(h, FX_GHOSTS * h->capacity);
}

/* Blocks of the tier that came before following began and that the model does not hold. */
static void look_around(fx_hazard *h) {
  uint32_t end = h->max_blocks - h->cursor < FX_LOOK ? h->max_blocks : h->cursor + FX_LOOK;
  for (; h->cursor < end && h->unwanted_count < h->max_blocks; h->cursor++) {
    uint32_t entry = h->entry_of[h->cursor];
    if (h->here[h->cursor] && (entry == FX_NONE || !fx_is_held(h, entry))) h->unwanted[h->unwanted_count++] = h->cursor;
  }
}

/* Whether it is time to change what is followed. */
static int judge(fx_hazard *h, uint32_t n, uint32_t hits, uint32_t lru_hits) {
  h->prompts++;
  h->asked += n;
  h->hits += hits;
  h->lru_hits += lru_hits;
  double mean = (double)h->asked / (double)h->prompts, capacity = h->capacity;
  double ahead = fmax(FX_AHEAD_SHARE * capacity, FX_AHEAD_PROMPTS * mean);
  double trust = 1.0 + fmin(1.0, (double)(h->prompts - h->switched) / FX_TRUST);
  double behind = trust * fmax(FX_BEHIND_SHARE / 2.0 * capacity, FX_BEHIND_PROMPTS * mean);
  h->lead = fmin(behind, fmax(-behind, h->lead + (double)hits - (double)lru_hits));
  if (h->following ? h->lead <= -behind : h->lead >= ahead && h->prompts >= FX_WARM) {
    h->switches++;
    h->switched = h->prompts;
    h->cursor = 0;
    return 1;
  }
  return 0;
}

/* ---- the verbs ---- */

static uint32_t held_of_path(const fx_hazard *h) {
  uint32_t held = 0;
  while (held < h->known && fx_is_held(h, h->path[held])) held++;
  return held;
}

uint32_t fx_hazard_put(fx_hazard *h, const uint64_t *words, uint32_t n, double now, int64_t output_tokens) {
  const fx_name *names = (const fx_name *)words;
  uint32_t longest = FX_GHOSTS * h->capacity, whole = n, entry = FX_NONE;
  if (n > longest) n = longest;
  h->length = h->known = h->unwanted_count = h->placed = 0;
  if (!n) return whole;
  h->now = now;
  h->stamp++;
  for (; h->known < n; h->path[h->known++] = entry)
    if ((entry = fx_entry_find(h, entry, names[h->known])) == FX_NONE) break;
  uint32_t held = held_of_path(h), prompt = fx_prompt_new(h), known = h->known;
  int change = judge(h, whole, held, fx_lru_use(h, prompt, known, n, 1));
  int continues = known && h->flags[h->path[known - 1]] & FX_END;
  h->length = n;
  learn(h, held, 1);
  for (uint32_t i = known; i < n; i++) h->path[i] = fx_entry_new(h, i ? h->path[i - 1] : FX_NONE, names[i]);
  h->flags[h->path[n - 1]] |= FX_END;
  uint32_t made = make_runs(h, prompt, continues, output_tokens, 1);
  held = admit(h, held);
  settle(h, held, made);
  fx_prompt_release(h, prompt);
  sweep(h);
  fx_rates_step(h->rates);
  if (change && !h->following) start_from_lru(h);
  if (change) h->following = !h->following;
  if (change || !h->following) return whole;
  look_around(h);
  uint32_t coming = held; /* blocks to hold that the tier does not have yet */
  for (uint32_t i = 0; i < held; i++) coming -= (uint32_t)fx_is_shared(h, h->path[i]);
  uint32_t spare = h->capacity - h->shared - coming; /* for blocks that are not worth holding */
  return whole - held > spare ? held + spare : whole;
}

void fx_hazard_read(fx_hazard *h, const uint32_t *blocks, uint32_t n, double now) {
  uint32_t above = n ? h->entry_of[blocks[0]] : FX_NONE;
  if (above == FX_NONE) return;
  const fx_run *first = &h->run[h->run_of[above]];
  if (first->stamp == h->stamp && first->last_use == now && !first->read_only) return; /* the put itself */
  above = FX_NONE;
  h->length = h->known = h->placed = 0;
  for (uint32_t i = 0; i < n && i < FX_GHOSTS * h->capacity; i++, h->known++) {
    uint32_t entry = h->entry_of[blocks[i]];
    if (entry == FX_NONE || h->parent[entry] != above) break;
    h->path[i] = above = entry;
  }
  if (!h->known) return;
  h->now = now;
  h->stamp++;
  uint32_t held = held_of_path(h), prompt = fx_prompt_new(h);
  h->length = h->known;
  fx_lru_use(h, prompt, h->known, h->known, 0);
  learn(h, held, 0);
  settle(h, held, make_runs(h, prompt, 1, -1, 0));
  fx_prompt_release(h, prompt);
}

/* An entry has no block any more. */
static void part(fx_hazard *h, uint32_t entry) {
  if (entry == FX_NONE || h->block_of[entry] == FX_NONE) return;
  h->shared -= (uint32_t)fx_is_shared(h, entry);
  h->entry_of[h->block_of[entry]] = FX_NONE;
  h->block_of[entry] = FX_NONE;
}

void fx_hazard_placed(fx_hazard *h, const uint32_t *blocks, uint32_t n) {
  for (uint32_t i = h->placed; i < n && i < h->length; i++) {
    uint32_t entry = h->path[i], block = blocks[i];
    if (block == FX_NONE || !fx_in_use(h, entry)) continue;
    if (h->block_of[entry] == block) continue;
    part(h, h->entry_of[block]);
    part(h, entry);
    h->block_of[entry] = block;
    h->entry_of[block] = entry;
    h->shared += (uint32_t)fx_is_shared(h, entry);
  }
  if (n > h->placed) h->placed = n;
}

void fx_hazard_came(fx_hazard *h, const uint32_t *blocks, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    uint32_t entry = h->entry_of[blocks[i]];
    h->here[blocks[i]] = 1;
    h->shared += entry != FX_NONE && fx_is_shared(h, entry);
  }
}

void fx_hazard_left(fx_hazard *h, const uint32_t *blocks, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    part(h, h->entry_of[blocks[i]]);
    h->here[blocks[i]] = 0;
  }
}

uint32_t fx_hazard_wanted(const fx_hazard *h, const uint32_t *blocks, uint32_t n, uint8_t *wanted) {
  uint32_t count = 0;
  if (!h->following) return n;
  for (uint32_t i = 0; i < n; i++) {
    uint32_t entry = h->entry_of[blocks[i]];
    count += wanted[i] = (entry != FX_NONE && fx_is_held(h, entry));
  }
  return count;
}

uint32_t fx_hazard_unwanted(fx_hazard *h, uint32_t *blocks, uint32_t limit) {
  uint32_t count = h->unwanted_count < limit ? h->unwanted_count : limit;
  memcpy(blocks, h->unwanted, count * sizeof *blocks);
  h->unwanted_count = 0;
  return count;
}

int fx_hazard_explain(const fx_hazard *h, uint32_t block, double now, fx_hazard_reason *reason) {
  uint32_t entry = block < h->max_blocks ? h->entry_of[block] : FX_NONE;
  if (entry == FX_NONE) return 0;
  const fx_run *run = &h->run[h->run_of[entry]];
  uint32_t bin = fx_rates_bin(now - run->last_use), class = run->class, depth = 0;
  *reason = (fx_hazard_reason){.held = (uint32_t)fx_is_held(h, entry),
                               .uses = h->uses[entry],
                               .last_use = run->last_use,
                               .value = fx_rates_value(h->rates, class, bin),
                               .hazard = fx_rates_hazard(h->rates, class, bin)};
  for (uint32_t at = class; at; at = fx_rates_parent(h->rates, at)) depth++;
  reason->depth = depth;
  for (uint32_t at = class; at; at = fx_rates_parent(h->rates, at))
    reason->traits[--depth] = fx_rates_code(h->rates, at);
  return 1;
}

void fx_hazard_look(const fx_hazard *h, fx_hazard_state *state) {
  *state = (fx_hazard_state){.used = h->used,
                             .ghosts = h->ghosts,
                             .entries = h->fresh - h->freed_count,
                             .runs = h->runs,
                             .classes = fx_rates_count(h->rates),
                             .following = (uint32_t)h->following,
                             .prompts = h->prompts,
                             .hits = h->hits,
                             .lru_hits = h->lru_hits,
                             .switches = h->switches,
                             .lead = h->lead,
                             .memory_bytes = h->memory_bytes};
}
