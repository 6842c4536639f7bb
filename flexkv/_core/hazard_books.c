/* Ghosts, runs, candidates and the LRU beside: the bookkeeping of hazard.c. */
#include <stdlib.h>
#include <string.h>

#include "hazard_impl.h"

/* ---- ghosts, oldest first; descendants before their ancestors ---- */

static void span_unlink(fx_hazard *h, uint32_t number) {
  fx_span *span = &h->span[number];
  fx_run *run = &h->run[span->run];
  *(span->older == FX_NONE ? &h->oldest_span : &h->span[span->older].newer) = span->newer;
  *(span->newer == FX_NONE ? &h->newest_span : &h->span[span->newer].older) = span->older;
  *(span->deeper == FX_NONE ? &run->oldest : &h->span[span->deeper].shallower) = span->shallower;
  *(span->shallower == FX_NONE ? &run->newest : &h->span[span->shallower].deeper) = span->deeper;
  span->newer = h->free_span;
  h->free_span = number;
}

/* The deepest `count` entries that the run held become ghosts, the deepest first. */
void fx_ghosts_add(fx_hazard *h, uint32_t number, uint32_t count) {
  fx_run *run = &h->run[number];
  h->ghosts += count;
  if (h->newest_span != FX_NONE && h->span[h->newest_span].run == number) {
    h->span[h->newest_span].count += count;
    return;
  }
  uint32_t made = h->free_span;
  if (made != FX_NONE)
    h->free_span = h->span[made].newer;
  else
    made = h->spans_made++;
  h->span[made] = (fx_span){number, count, FX_NONE, h->newest_span, FX_NONE, run->newest};
  *(h->newest_span == FX_NONE ? &h->oldest_span : &h->span[h->newest_span].newer) = made;
  *(run->newest == FX_NONE ? &run->oldest : &h->span[run->newest].shallower) = made;
  h->newest_span = run->newest = made;
}

/* The first `count` ghosts of the run are none any more. */
void fx_ghosts_take(fx_hazard *h, uint32_t number, uint32_t count) {
  fx_run *run = &h->run[number];
  h->ghosts -= count;
  while (count) {
    fx_span *span = &h->span[run->newest];
    uint32_t some = fx_least(span->count, count);
    span->count -= some;
    count -= some;
    if (!span->count) span_unlink(h, run->newest);
  }
}

void fx_ghosts_trim(fx_hazard *h, uint32_t limit) {
  while (h->ghosts > limit) {
    fx_span *span = &h->span[h->oldest_span];
    uint32_t number = span->run, first, some = fx_least(h->ghosts - limit, span->count);
    fx_run *run = &h->run[number];
    h->ghosts -= some;
    span->count -= some;
    if (!span->count) span_unlink(h, h->oldest_span);
    while (some) {
      uint32_t gone = fx_piece_up(h, run->last, some, &first), above = fx_parent(h, first);
      fx_entries_forget(h, first, gone);
      run->last = above;
      run->end -= gone;
      some -= gone;
    }
    if (run->stamp == h->stamp) h->length = fx_least(h->length, run->end); /* the path itself is forgotten */
    if (run->low == run->end) fx_run_release(h, number);
  }
}

/* ---- runs ---- */

/* A run that holds nothing yet; its entries and `last` are set by who makes it. */
uint32_t fx_run_new(fx_hazard *h, uint32_t prompt, uint32_t class, uint32_t low, uint32_t end) {
  uint32_t number = h->free_run;
  if (number != FX_NONE)
    h->free_run = h->turn[number].next;
  else
    number = h->runs_made++;
  uint32_t last = h->turn[0].prev;
  h->turn[number] = (fx_turn){.last_use = h->now, .prev = last};
  h->turn[last].next = h->turn[0].prev = number;
  h->run[number] = (fx_run){.stamp = h->stamp, .low = low, .high = low, .end = end,
                            .deepest = FX_NONE, .oldest = FX_NONE, .newest = FX_NONE, .prompt = prompt,
                            .class = class, .spot = FX_NONE, .current = 1};
  h->prompt[prompt].runs++;
  h->runs++;
  return number;
}

/* It has no entries left. */
void fx_run_release(fx_hazard *h, uint32_t number) {
  fx_run *run = &h->run[number];
  fx_withdraw(h, number);
  fx_prompt_release(h, run->prompt);
  fx_turn *turn = &h->turn[number];
  h->turn[turn->prev].next = turn->next;
  h->turn[turn->next].prev = turn->prev;
  turn->next = h->free_run;
  h->free_run = number;
  h->runs--;
}

/* ---- candidates ---- */

void fx_price(fx_hazard *h, fx_candidates *of) {
  const fx_run *run = &h->run[of->run[0]];
  if (!fx_rates_learned(h->rates))
    of->value = 0.0; /* ties: the one used longest ago */
  else
    of->value = fx_rates_value(h->rates, run->class, fx_rates_bin(h->now - h->turn[of->run[0]].last_use));
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
  for (uint32_t i = 0; i < h->known_pieces;) {
    uint32_t start = h->path[i].depth, owner = h->run[h->run_of[h->path[i].entry]].prompt, end = known;
    fx_prompt *from = &h->prompt[owner];
    for (i++; i < h->known_pieces; i++)
      if (h->run[h->run_of[h->path[i].entry]].prompt != owner) {
        end = h->path[i].depth;
        break;
      }
    uint32_t kept = fx_least(from->high, end);
    kept = kept > start ? kept - start : 0;
    if (!missed) hits += kept;
    missed |= kept < end - start;
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
