/* The guard: whether the tier follows what was learned, or LRU, and how it changes from one to the other. */
#include <math.h>

#include "hazard_impl.h"

/* Blocks by which the learned order must be ahead before it is followed, and behind before it is left. */
#define FX_AHEAD_PROMPTS 2.0 /* mean prompts */
#define FX_AHEAD_SHARE 0.001 /* of the capacity */
#define FX_BEHIND_PROMPTS 5.0 /* at first; twice that after FX_TRUST prompts in its favour */
#define FX_TRUST 2048.0
#define FX_BEHIND_SHARE 0.01
#define FX_WARM 300u /* prompts before anything but LRU is followed */
#define FX_LOOK 1024u /* blocks of the tier to look at per prompt after following began */

/* The model comes to hold what the LRU beside holds, which is what the tier holds: so both go on from the same blocks.
 * It costs a look at every run, and is done whenever following begins. */
static void start_from_lru(fx_hazard *h) {
  while (h->active_count) fx_shorten(h, h->candidates[h->active[0]].run[0], FX_NONE);
  for (uint32_t number = h->turn[0].next; number; number = h->turn[number].next) {
    fx_run *run = &h->run[number];
    uint32_t keep = fx_least(h->prompt[run->prompt].high, run->end), first;
    if (keep <= run->low) continue;
    fx_ghosts_take(h, number, keep - run->low);
    run->high = keep;
    h->used += fx_held(run);
    uint32_t at = run->deepest = fx_run_at(h, run, keep - 1);
    for (uint32_t left = fx_held(run); left; at = fx_parent(h, first)) {
      uint32_t some = fx_piece_up(h, at, left, &first);
      h->shared += fx_count_here(h, first, some);
      left -= some;
    }
    if (at != FX_NONE) h->kids[at]++;
  }
  for (uint32_t number = h->turn[0].next; number; number = h->turn[number].next)
    if (fx_held(&h->run[number]) && !h->kids[h->run[number].deepest]) fx_offer(h, number);
  fx_ghosts_trim(h, FX_GHOSTS * h->capacity);
}

void fx_switch(fx_hazard *h) {
  if (!h->following) start_from_lru(h);
  h->following = !h->following;
}

/* Blocks of the tier that came before following began and that the model does not hold. */
void fx_look_around(fx_hazard *h) {
  uint32_t end = h->max_blocks - h->cursor < FX_LOOK ? h->max_blocks : h->cursor + FX_LOOK;
  for (; h->cursor < end && h->unwanted_count < h->max_blocks; h->cursor++) {
    uint32_t entry = fx_entry_of(h, h->cursor);
    if (!fx_in_tier(h, h->cursor) || (entry != FX_NO_ENTRY && fx_is_held(h, entry))) continue;
    h->unwanted[h->unwanted_count++] = h->cursor;
  }
}

/* Whether it is time to change what is followed. */
int fx_judge(fx_hazard *h, uint32_t n, uint32_t hits, uint32_t lru_hits) {
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
