#include "hazard_impl.h"

#define WRONG_IF(what) \
  if (what) return #what

/* The runs, in a ring, and what they say of their entries. */
static const char *check_runs(const fx_hazard *h) {
  uint64_t entries = 0, held = 0, runs = 0;
  for (uint32_t i = h->run[0].next; i; i = h->run[i].next, runs++) {
    const fx_run *run = &h->run[i];
    WRONG_IF(runs >= h->runs);
    WRONG_IF(h->run[run->next].prev != i || !run->entries || run->held > run->entries || run->current);
    entries += run->entries;
    held += run->held;
    uint32_t at = run->deepest;
    for (uint32_t k = 0; k < run->held; k++, at = h->parent[at])
      WRONG_IF(at == FX_NONE || !fx_in_use(h, at) || h->run_of[at] != i || !fx_is_held(h, at));
    int leaf = run->held && !h->kids[run->deepest];
    WRONG_IF(leaf != (run->spot != FX_NONE));
    WRONG_IF(leaf && h->candidates[run->class].run[run->spot] != i);
  }
  WRONG_IF(runs != h->runs || entries != h->fresh - h->freed_count || held != h->used);
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

const char *fx_hazard_check(const fx_hazard *h) {
  uint32_t used = 0, ghosts = 0, known = 0, shared = 0;
  WRONG_IF(h->used > h->capacity || h->ghosts > FX_GHOSTS * h->capacity);
  for (uint32_t i = 0; i < h->fresh; i++) {
    if (!fx_in_use(h, i)) continue;
    uint32_t parent = h->parent[i];
    known++;
    used += fx_is_held(h, i) != 0;
    shared += fx_is_shared(h, i) != 0;
    WRONG_IF(parent != FX_NONE && !fx_in_use(h, parent));
    WRONG_IF(fx_is_held(h, i) && parent != FX_NONE && !fx_is_held(h, parent));
    WRONG_IF(fx_entry_find(h, parent, h->name[i]) != i);
    uint32_t block = h->block_of[i];
    WRONG_IF(block != FX_NONE && (block >= h->max_blocks || h->entry_of[block] != i));
  }
  for (uint32_t i = h->oldest_ghost; i != FX_NONE; i = h->newer[i], ghosts++)
    WRONG_IF(ghosts > h->ghosts || !fx_in_use(h, i) || fx_is_held(h, i));
  WRONG_IF(shared != h->shared);
  WRONG_IF(used != h->used || ghosts != h->ghosts || used + ghosts != known || known != h->fresh - h->freed_count);
  for (uint32_t i = 0; i < h->max_blocks; i++)
    WRONG_IF(h->entry_of[i] != FX_NONE && (!fx_in_use(h, h->entry_of[i]) || h->block_of[h->entry_of[i]] != i));
  const char *wrong = check_runs(h);
  return wrong ? wrong : check_lru(h);
}
