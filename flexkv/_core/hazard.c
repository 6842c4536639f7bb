#define _GNU_SOURCE
#include "hazard.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hazard_impl.h"
#include "pages.h"

/* ---- life ---- */

static void empty(fx_hazard *h) {
  for (uint32_t block = 0; block <= h->max_blocks; block++) h->tag[block] = FX_NO_ENTRY << 1;
  while (h->active_count) h->candidates[h->active[--h->active_count]].count = 0;
  h->ghosts = h->used = h->lru_used = h->runs = 0;
  h->oldest_span = h->newest_span = h->free_span = h->free_run = h->free_prompt = FX_NONE;
  h->runs_made = h->prompts_made = 1;
  h->spans_made = 0;
  h->turn[0] = (fx_turn){0};
  h->prompt[0] = (fx_prompt){.runs = 1};
  h->length = h->known = h->pieces = h->known_pieces = h->unwanted_count = h->shared = 0;
}

/* The next table of the memory; NULL, and only counted, while there is none. */
static void *next_table(fx_hazard *h, size_t *at, size_t count, size_t size) {
  size_t start = (*at + 63) / 64 * 64;
  *at = start + count * size;
  return h->memory ? (char *)h->memory + start : NULL;
}
#define TABLE(column, count) (h->column = next_table(h, &at, (count), sizeof *h->column))

/* Lay out all tables in one piece of memory, which is all zeros; returns how large it is. */
static size_t lay_out(fx_hazard *h) {
  size_t limit = h->limit, spare = limit + 8, cells = 64, blocks = (size_t)h->max_blocks + 1, at = 0;
  size_t longest = (size_t)FX_GHOSTS * h->capacity + 1;
  while (cells < limit) cells *= 2;
  h->table_mask = (uint32_t)cells - 1;
  TABLE(name, spare), TABLE(parent, spare), TABLE(depth, spare), TABLE(run_of, spare), TABLE(kids, spare);
  TABLE(block_of, spare), TABLE(uses, spare), TABLE(linked, spare), TABLE(ended, spare), TABLE(here, spare);
  TABLE(table, cells), TABLE(span, limit), TABLE(run, limit + 1), TABLE(turn, limit + 1), TABLE(prompt, limit + 2);
  TABLE(path, longest), TABLE(fresh, longest), TABLE(tag, blocks);
  TABLE(unwanted, blocks), TABLE(candidates, fx_rates_limit()), TABLE(active, fx_rates_limit());
  return at;
}

fx_hazard *fx_hazard_open(uint32_t capacity, uint32_t max_blocks, int sabotage) {
  size_t limit = (size_t)capacity * (1 + 2 * FX_GHOSTS) + 1; /* held, ghosts, and a prompt as long as all ghosts */
  fx_hazard *h = calloc(1, sizeof *h);
  if (!h) return NULL;
  h->capacity = capacity;
  h->max_blocks = max_blocks;
  h->sabotage = sabotage;
  h->limit = limit < FX_NO_ENTRY ? (uint32_t)limit : 0;
  h->memory_bytes = lay_out(h);
  if (h->limit && (h->memory = fx_pages_map(h->memory_bytes)) && (h->vacant = fx_runs_open(h->limit)) &&
      (h->rates = fx_rates_open())) {
    lay_out(h);
    empty(h);
    return h;
  }
  fx_hazard_close(h);
  return NULL;
}

void fx_hazard_close(fx_hazard *h) {
  if (!h) return;
  if (h->candidates)
    for (uint32_t i = 0; i < fx_rates_limit(); i++) free(h->candidates[i].run);
  fx_rates_close(h->rates);
  fx_runs_close(h->vacant);
  fx_pages_unmap(h->memory, h->memory_bytes);
  free(h);
}

void fx_hazard_clear(fx_hazard *h) {
  for (uint32_t number = h->turn[0].next; number; number = h->turn[number].next) {
    const fx_run *run = &h->run[number];
    for (uint32_t left = run->end - run->low, entry = run->last, first; left;) {
      uint32_t some = fx_piece_up(h, entry, left, &first);
      entry = fx_parent(h, first);
      memset(h->kids + first, 0, some * sizeof *h->kids);
      memset(h->here + first, 0, some);
      memset(h->linked + first, 0, some);
      fx_runs_give_run(h->vacant, first, some);
      left -= some;
    }
  }
  memset(h->table, 0, ((size_t)h->table_mask + 1) * sizeof *h->table);
  empty(h);
}

/* ---- who leaves, who comes ---- */

/* Neighbours, the last of them first, are held no longer. */
static void let_go(fx_hazard *h, uint32_t first, uint32_t n) {
  h->used -= n;
  uint32_t shared = fx_count_here(h, first, n);
  h->shared -= shared;
  if (!h->following || !shared) return;
  uint32_t *unwanted = h->unwanted + h->unwanted_count;
  const uint32_t *block_of = h->block_of;
  const uint8_t *here = h->here;
  h->unwanted_count += shared;
  for (uint32_t entry = first + n; entry-- > first;)
    if (here[entry]) *unwanted++ = block_of[entry];
}

/* How many neighbours, from the last up, may leave in turn: until one has other runs below it. */
static uint32_t childless(const fx_hazard *h, uint32_t first, uint32_t n) {
  const uint32_t *last = h->kids + first + n - 1;
  uint32_t count = 1;
  for (; count + 8 <= n; count += 8) {
    uint32_t any = 0;
    for (uint32_t i = 0; i < 8; i++) any |= *(last - count - i);
    if (any) break;
  }
  while (count < n && !*(last - count)) count++;
  return count;
}

/* Evict up to `want` entries from the end of a run; returns how many. */
uint32_t fx_shorten(fx_hazard *h, uint32_t number, uint32_t want) {
  fx_run *run = &h->run[number];
  uint32_t gone = 0, parent = FX_NONE;
  int blocked = 0;
  want = fx_least(want, fx_held(run));
  while (gone < want && !blocked) {
    uint32_t first, some = fx_piece_up(h, run->deepest, want - gone, &first), free = childless(h, first, some);
    first += some - free;
    let_go(h, first, free);
    gone += free;
    run->deepest = parent = fx_parent(h, first);
    blocked = parent != FX_NONE && h->kids[parent];
  }
  run->high -= gone;
  fx_ghosts_add(h, number, gone);
  if (fx_held(run)) {
    if (blocked) fx_withdraw(h, number);
    return gone;
  }
  fx_withdraw(h, number);
  if (parent == FX_NONE || --h->kids[parent]) return gone;
  const fx_run *above = &h->run[h->run_of[parent]];
  if (h->depth[parent] + 1 == above->high && !above->current) fx_offer(h, h->run_of[parent]);
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
    gone += fx_shorten(h, worst->run[0], want - gone);
  }
  return gone;
}

/* Hold as much of the path as there is room, or worse entries, for; returns how many of its blocks are held. */
static uint32_t admit(fx_hazard *h, uint32_t held, uint32_t made) {
  uint32_t goal = fx_least(h->length, h->capacity), before = held;
  if (h->capacity - h->used < goal - held)
    for (uint32_t i = 0; i < h->active_count; i++) fx_price(h, &h->candidates[h->active[i]]);
  for (uint32_t i = 0; i < made && held < goal; i++) {
    const fx_run *run = &h->run[h->fresh[i]];
    if (run->end <= held) continue;
    uint32_t room = h->capacity - h->used, want = fx_least(run->end, goal) - held;
    if (room < want) {
      double value = fx_rates_value(h->rates, run->class, 0);
      room += make_room(h, fx_rates_learned(h->rates) && !h->sabotage ? value : HUGE_VAL, want - room);
    }
    uint32_t some = fx_least(room, want);
    h->used += some;
    held += some;
    if (some < want) break;
  }
  h->shared += fx_path_here(h, before, held);
  return held;
}

/* What is not held becomes a ghost, the end first; the new runs may be evicted from now on. */
static void settle(fx_hazard *h, uint32_t held, uint32_t made) {
  for (uint32_t i = made; i-- > 0;) {
    uint32_t number = h->fresh[i];
    fx_run *run = &h->run[number];
    run->current = 0;
    run->high = held < run->low ? run->low : fx_least(held, run->end);
    if (run->high < run->end) fx_ghosts_add(h, number, run->end - run->high);
    if (!fx_held(run)) continue;
    run->deepest = run->high == run->end ? run->last : fx_path_at(h, run->high - 1);
    if (run->low) h->kids[fx_path_at(h, run->low - 1)]++;
  }
  if (held) {
    uint32_t deepest = fx_path_at(h, held - 1);
    if (!h->kids[deepest]) fx_offer(h, h->run_of[deepest]);
  }
  fx_ghosts_trim(h, FX_GHOSTS * h->capacity);
}

/* Count the age bins that some runs have entered unused since they were looked at: all of them in a hundred prompts. */
static void sweep(fx_hazard *h) {
  fx_turn *turns = h->turn;
  uint32_t some = fx_least(h->runs / 100 + 1, h->runs), first = turns[0].next, last = turns[0].prev, number = first;
  for (uint32_t left = some; left; left--, number = turns[number].next) {
    fx_turn *turn = &turns[number];
    double age = h->now - turn->last_use;
    if (age < fx_rates_start(h->rates, turn->next_bin)) continue;
    const fx_run *run = &h->run[number];
    uint32_t bin = fx_rates_bin(age);
    fx_rates_entered(h->rates, run->class, turn->next_bin, bin, run->end - run->low);
    turn->next_bin = bin + 1;
  }
  if (!number) return; /* that was all of them */
  turns[last].next = first; /* those go to the end */
  turns[first].prev = last;
  turns[0].prev = turns[number].prev;
  turns[turns[0].prev].next = 0;
  turns[0].next = number;
  turns[number].prev = 0;
}

/* ---- the verbs ---- */

static void begin(fx_hazard *h) { h->length = h->known = h->pieces = h->known_pieces = 0; }

static uint32_t held_of_path(const fx_hazard *h) {
  uint32_t held = 0;
  for (uint32_t i = 0; i < h->known_pieces; i++) {
    uint32_t end = fx_piece_end(h, i), high = h->run[h->run_of[h->path[i].entry]].high;
    if (high <= h->path[i].depth) break;
    held = fx_least(end, high);
    if (held < end) break;
  }
  return held;
}

static uint32_t serve(fx_hazard *h, const uint64_t *keys, uint32_t n, double now, int64_t output_tokens) {
  uint32_t whole = n;
  n = fx_least(n, FX_GHOSTS * h->capacity);
  begin(h);
  h->unwanted_count = 0;
  if (!n) return whole;
  h->now = now;
  h->stamp++;
  fx_path_keys(h, keys, n);
  h->known_pieces = h->pieces;
  h->length = h->known;
  uint32_t held = held_of_path(h), prompt = fx_prompt_new(h), known = h->known;
  int change = fx_judge(h, whole, held, fx_lru_use(h, prompt, known, n, 1));
  int continues = known && h->ended[fx_path_at(h, known - 1)];
  fx_path_learn(h, 1);
  if (known < n) fx_entries_new(h, keys + 2 * (size_t)known, n - known);
  h->ended[fx_path_at(h, n - 1)] = 1;
  uint32_t made = fx_path_runs(h, prompt, continues, output_tokens, 1);
  held = h->kept = admit(h, held, made);
  settle(h, held, made);
  fx_prompt_release(h, prompt);
  sweep(h);
  fx_rates_step(h->rates);
  if (change) fx_switch(h);
  if (change || !h->following) return whole;
  fx_look_around(h);
  uint32_t coming = held - fx_path_here(h, 0, held);   /* blocks to hold that the tier does not have yet */
  uint32_t spare = h->capacity - h->shared - coming; /* for blocks that are not worth holding */
  return whole - held > spare ? held + spare : whole;
}

uint32_t fx_hazard_put(fx_hazard *h, const uint64_t *keys, uint32_t n, double now, int64_t output_tokens,
                       const uint32_t *blocks, uint32_t known, uint32_t *unwanted) {
  uint32_t wanted = serve(h, keys, n, now, output_tokens);
  fx_hazard_placed(h, blocks, 0, known);
  *unwanted = h->unwanted_count;
  return wanted;
}

static void read_blocks(fx_hazard *h, const uint32_t *blocks, uint32_t n, double now) {
  begin(h);
  fx_path_blocks(h, blocks, fx_least(n, FX_GHOSTS * h->capacity));
  h->known_pieces = h->pieces;
  h->length = h->known;
  if (!h->known) return;
  h->now = now;
  h->stamp++;
  uint32_t held = held_of_path(h), prompt = fx_prompt_new(h);
  fx_lru_use(h, prompt, h->known, h->known, 0);
  fx_path_learn(h, 0);
  settle(h, held, fx_path_runs(h, prompt, 1, -1, 0));
  fx_prompt_release(h, prompt);
}

uint32_t fx_hazard_used(fx_hazard *h, const uint32_t *blocks, uint32_t n, double now, uint8_t *wanted) {
  uint32_t first = n ? fx_entry_of(h, blocks[0]) : FX_NO_ENTRY;
  const fx_run *run = first == FX_NO_ENTRY ? NULL : &h->run[h->run_of[first]];
  int by_put = run && run->stamp == h->stamp && h->now == now && !run->read_only;
  if (run && !by_put) read_blocks(h, blocks, n, now);
  if (!by_put || n > h->length || fx_entry_of(h, blocks[n - 1]) != fx_path_at(h, n - 1))
    return fx_hazard_wanted(h, blocks, n, wanted);
  uint32_t held = fx_least(h->kept, n); /* those are the first n of the path */
  memset(wanted, 1, held);
  memset(wanted + held, 0, n - held);
  return h->following ? held : n;
}

const uint32_t *fx_hazard_unwanted(const fx_hazard *h) { return h->unwanted; }

int fx_hazard_explain(const fx_hazard *h, uint32_t block, double now, fx_hazard_reason *reason) {
  uint32_t entry = block < h->max_blocks ? fx_entry_of(h, block) : FX_NO_ENTRY;
  if (entry == FX_NO_ENTRY) return 0;
  const fx_run *run = &h->run[h->run_of[entry]];
  double last_use = h->turn[h->run_of[entry]].last_use;
  uint32_t bin = fx_rates_bin(now - last_use), class = run->class, depth = 0;
  *reason = (fx_hazard_reason){.held = (uint32_t)fx_is_held(h, entry),
                               .uses = h->uses[entry],
                               .last_use = last_use,
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
                             .entries = h->used + h->ghosts,
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
