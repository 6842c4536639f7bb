#include "hazard_impl.h"

#define WRONG_IF(what) \
  if (what) return #what

/* The spans of a run: its ghosts, to the last one. */
static const char *check_spans(const fx_hazard *h, uint32_t number) {
  const fx_run *run = &h->run[number];
  uint32_t ghosts = 0, deeper = FX_NONE;
  for (uint32_t i = run->oldest; i != FX_NONE; deeper = i, i = h->span[i].shallower) {
    WRONG_IF(h->span[i].run != number || !h->span[i].count || h->span[i].deeper != deeper);
    ghosts += h->span[i].count;
    WRONG_IF(ghosts > run->end - run->low);
  }
  WRONG_IF(run->newest != deeper || ghosts != run->end - run->high);
  return 0;
}

/* What of its entries is in the tier, and runs that begin below. */
typedef struct {
  uint64_t shared, kids, begun;
} fx_tally;

static const char *check_entry(const fx_hazard *h, uint32_t entry) {
  uint64_t key[] = {h->name[entry], 0};
  WRONG_IF(h->linked[entry] > 1 || (h->linked[entry] && !entry));
  WRONG_IF(fx_entry_find(h, fx_parent(h, entry), key) != entry);
  WRONG_IF(h->here[entry] && (h->block_of[entry] == FX_NONE || !fx_in_tier(h, h->block_of[entry])));
  WRONG_IF(h->block_of[entry] != FX_NONE && fx_entry_of(h, h->block_of[entry]) != entry);
  return 0;
}

/* A run's entries, from its last one up. */
static const char *check_entries(const fx_hazard *h, uint32_t number, fx_tally *tally) {
  const fx_run *run = &h->run[number];
  const char *wrong;
  uint32_t at = run->last;
  for (uint32_t depth = run->end; depth-- > run->low; at = fx_parent(h, at)) {
    WRONG_IF(at == FX_NONE || h->run_of[at] != number || h->depth[at] != depth);
    WRONG_IF(fx_held(run) && depth == run->high - 1 && at != run->deepest);
    if ((wrong = check_entry(h, at))) return wrong;
    tally->kids += h->kids[at];
    tally->shared += depth < run->high && h->here[at];
  }
  WRONG_IF((at == FX_NONE) != !run->low);
  if (at == FX_NONE) return 0;
  tally->begun += fx_held(run) != 0;
  WRONG_IF(h->depth[at] != run->low - 1);
  WRONG_IF(fx_held(run) && (!h->kids[at] || !fx_is_held(h, at)));
  return 0;
}

/* The runs, in a ring, and what they say of their entries. */
static const char *check_runs(const fx_hazard *h) {
  uint64_t entries = 0, held = 0, runs = 0;
  fx_tally tally = {0};
  const char *wrong;
  for (uint32_t i = h->turn[0].next; i; i = h->turn[i].next, runs++) {
    const fx_run *run = &h->run[i];
    WRONG_IF(runs >= h->runs);
    WRONG_IF(h->turn[h->turn[i].next].prev != i || run->current);
    WRONG_IF(run->low >= run->end || run->high < run->low || run->high > run->end);
    entries += run->end - run->low;
    held += fx_held(run);
    if ((wrong = check_entries(h, i, &tally)) || (wrong = check_spans(h, i))) return wrong;
    int leaf = fx_held(run) && !h->kids[run->deepest];
    WRONG_IF(leaf != (run->spot != FX_NONE));
    WRONG_IF(leaf && h->candidates[run->class].run[run->spot] != i);
  }
  WRONG_IF(runs != h->runs || held != h->used || entries != h->used + h->ghosts);
  WRONG_IF(entries != h->limit - fx_runs_free(h->vacant));
  WRONG_IF(tally.kids != tally.begun || tally.shared != h->shared);
  return 0;
}

static const char *check_lru(const fx_hazard *h) {
  uint64_t kept = 0;
  for (uint32_t i = h->prompt[0].next, steps = 0; i; i = h->prompt[i].next, steps++) {
    WRONG_IF(steps > h->prompts_made || h->prompt[i].low >= h->prompt[i].high || !h->prompt[i].runs);
    kept += h->prompt[i].high - h->prompt[i].low;
  }
  WRONG_IF(kept != h->lru_used || kept > h->capacity);
  return 0;
}

static const char *check_blocks(const fx_hazard *h) {
  for (uint32_t i = 0; i < h->max_blocks; i++) {
    uint32_t entry = fx_entry_of(h, i);
    if (entry == FX_NO_ENTRY) continue;
    WRONG_IF(h->block_of[entry] != i || h->here[entry] != fx_in_tier(h, i));
  }
  return 0;
}

const char *fx_hazard_check(const fx_hazard *h) {
  uint32_t ghosts = 0, older = FX_NONE;
  const char *wrong;
  WRONG_IF(h->used > h->capacity || h->ghosts > FX_GHOSTS * h->capacity);
  if ((wrong = check_runs(h)) || (wrong = check_lru(h)) || (wrong = check_blocks(h))) return wrong;
  for (uint32_t i = h->oldest_span; i != FX_NONE; older = i, i = h->span[i].newer) {
    WRONG_IF(h->span[i].older != older || ghosts > h->ghosts);
    ghosts += h->span[i].count;
  }
  WRONG_IF(ghosts != h->ghosts);
  return 0;
}
