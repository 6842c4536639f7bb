/* The inside of hazard, shared by hazard.c (what a prompt does), hazard_books.c (entries, runs, candidates, ghosts, the
 * LRU beside) and hazard_check.c. */
#ifndef FX_HAZARD_IMPL_H
#define FX_HAZARD_IMPL_H
#include <stddef.h>

#include "hazard.h"
#include "rates.h"

#define FX_NONE 0xFFFFFFFFu
#define FX_GONE 0xFEFEFEFEu /* parent of an entry that is not in use */
#define FX_HELD 1u          /* flags of an entry: the model holds it; a prompt ended here */
#define FX_END 2u
#define FX_GHOSTS 4u /* times the capacity */

typedef struct {
  uint64_t lo, hi;
} fx_name;

typedef struct {
  double last_use;
  uint64_t stamp; /* of the prompt */
  uint32_t entries, held, deepest; /* deepest: of those held */
  uint32_t prompt, class, spot;    /* spot: place among the candidates of its class, FX_NONE: it is none */
  uint32_t next, prev;             /* runs in use, in a ring through run 0; free ones by `next` */
  uint8_t next_bin, read_only, current; /* current: of the prompt being served, which does not evict itself */
} fx_run;

/* A prompt for the LRU beside: it keeps [low, high) of the prompt's path. */
typedef struct {
  uint32_t low, high, runs, next, prev;
} fx_prompt;

/* Runs of one class whose deepest held entry could leave, a heap: the one used longest ago first. */
typedef struct {
  uint32_t *run;
  uint32_t count, room, active; /* active: place among the classes that have candidates */
  double value;                 /* of the first, now */
} fx_candidates;

struct fx_hazard {
  uint32_t capacity, max_blocks;
  uint32_t limit, fresh, freed_count; /* limit: entries there can be; fresh: never used from here on */
  int sabotage;
  fx_name *name;
  uint32_t *parent, *depth, *run_of, *kids, *block_of, *newer, *older, *freed; /* by entry; newer, older: of ghosts */
  uint8_t *uses, *flags;
  uint64_t *table; /* entries that do not follow their parent: low half of the name << 32 | entry */
  uint32_t table_mask;
  uint32_t oldest_ghost, newest_ghost, ghosts, used;
  fx_run *run;
  uint32_t runs, runs_made, free_run;
  fx_prompt *prompt;
  uint32_t prompts_made, free_prompt, lru_used; /* prompt 0 is the ring's head: oldest first */
  fx_candidates *candidates;
  uint32_t *active, active_count;
  fx_rates *rates;
  uint32_t *path, *fresh_runs, length, known, placed; /* of the prompt served last */
  uint32_t *entry_of;                         /* by block */
  uint8_t *here;
  uint32_t shared; /* entries held that are here */
  uint32_t *unwanted, unwanted_count, cursor; /* cursor: those below were looked at since following began */
  double now;
  uint64_t stamp, prompts, hits, lru_hits, asked, switches, switched;
  double lead;
  int following;
  size_t memory_bytes;
};

static inline int fx_in_use(const fx_hazard *h, uint32_t entry) { return h->parent[entry] != FX_GONE; }
static inline int fx_is_held(const fx_hazard *h, uint32_t entry) { return h->flags[entry] & FX_HELD; }

/* The model and the tier both hold it. */
static inline int fx_is_shared(const fx_hazard *h, uint32_t entry) {
  uint32_t block = h->block_of[entry];
  return fx_is_held(h, entry) && block != FX_NONE && h->here[block];
}

/* hazard_books.c */
uint32_t fx_entry_find(const fx_hazard *h, uint32_t parent, fx_name name);
uint32_t fx_entry_new(fx_hazard *h, uint32_t parent, fx_name name);
void fx_ghost_add(fx_hazard *h, uint32_t entry);
void fx_ghost_remove(fx_hazard *h, uint32_t entry);
void fx_ghosts_trim(fx_hazard *h, uint32_t limit);
uint32_t fx_run_new(fx_hazard *h, uint32_t prompt, uint32_t number, uint32_t entries);
void fx_run_release(fx_hazard *h, uint32_t run, uint32_t entries);
void fx_offer(fx_hazard *h, uint32_t run);
void fx_withdraw(fx_hazard *h, uint32_t run);
void fx_price(fx_hazard *h, fx_candidates *of);
uint32_t fx_prompt_new(fx_hazard *h);
void fx_prompt_release(fx_hazard *h, uint32_t prompt);
uint32_t fx_lru_use(fx_hazard *h, uint32_t prompt, uint32_t known, uint32_t n, int insert);
#endif
