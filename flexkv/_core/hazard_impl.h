/* The inside of hazard, shared by hazard.c (what a prompt does), hazard_path.c (what is known of its path, what
 * that teaches), hazard_guard.c (whether that is followed), hazard_books.c (runs, candidates, ghosts, the LRU beside),
 * hazard_entries.c (entries and their blocks) and hazard_check.c. */
#ifndef FX_HAZARD_IMPL_H
#define FX_HAZARD_IMPL_H
#include <stddef.h>

#include "hazard.h"
#include "rates.h"
#include "runs.h"

#define FX_NONE 0xFFFFFFFFu
#define FX_GHOSTS 4u /* times the capacity */

/* Entries [low, end) of a prompt's path, by depth; those below `high` are held, the others are ghosts. */
typedef struct {
  uint64_t stamp; /* of the prompt */
  uint32_t low, high, end;
  uint32_t deepest, last;       /* the entries at high - 1, if any is held, and at end - 1 */
  uint32_t oldest, newest;      /* its spans of ghosts: the oldest is the deepest */
  uint32_t prompt, class, spot; /* spot: place among the candidates of its class, FX_NONE: it is none */
  uint8_t read_only, current;   /* current: of the prompt being served, which does not evict itself */
} fx_run;

/* A run's turn to be looked at; apart from the rest of it, because they are looked at one after the other. */
typedef struct {
  double last_use;
  uint32_t next_bin;
  uint32_t next, prev; /* runs in use, in a ring through run 0; free ones by `next` */
} fx_turn;

/* Ghosts of one run that followed each other into the queue of ghosts, deepest first. */
typedef struct {
  uint32_t run, count;
  uint32_t newer, older;         /* in the queue; free ones by `newer` */
  uint32_t shallower, deeper;    /* in the run */
} fx_span;

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

/* Entries of a path with neighbouring numbers, and (those known before the prompt came) of one run. */
typedef struct {
  uint32_t entry, depth, count;
} fx_piece;

struct fx_hazard {
  uint32_t capacity, max_blocks, limit; /* limit: entries there can be */
  int sabotage;
  /* by entry; one that is linked follows its parent, entry - 1, and only the others are in the table */
  uint64_t *name; /* low half of the key */
  uint32_t *parent, *depth, *run_of, *kids, *block_of; /* kids: runs that begin below it and hold something */
  uint8_t *uses, *linked, *ended, *here;               /* here: its block is in the tier */
  uint32_t *table, table_mask; /* of entry + 1, 0: vacant */
  fx_runs *vacant;
  uint32_t ghosts, used;
  fx_span *span;
  uint32_t spans_made, free_span, oldest_span, newest_span;
  fx_run *run;
  fx_turn *turn;
  uint32_t runs, runs_made, free_run;
  fx_prompt *prompt;
  uint32_t prompts_made, free_prompt, lru_used; /* prompt 0 is the ring's head: oldest first */
  fx_candidates *candidates;
  uint32_t *active, active_count;
  fx_rates *rates;
  fx_piece *path; /* of the prompt served last; `known` entries in the first `known_pieces` */
  uint32_t *fresh, pieces, known_pieces, length, known, kept; /* kept: held of a put */ /* fresh: its runs */
  uint32_t *tag; /* by block: see fx_entry_of, fx_in_tier */
  uint32_t shared; /* entries held that are here */
  uint32_t *unwanted, unwanted_count, cursor; /* cursor: those below were looked at since following began */
  double now;
  uint64_t stamp, prompts, hits, lru_hits, asked, switches, switched;
  double lead;
  int following;
  void *memory;
  size_t memory_bytes;
};

/* What is known of a block in one word: 2 * entry, FX_NO_ENTRY if it has none; and 1 if it is in the tier. */
#define FX_NO_ENTRY (FX_NONE >> 1)
static inline uint32_t fx_entry_of(const fx_hazard *h, uint32_t block) { return h->tag[block] >> 1; }
static inline uint32_t fx_in_tier(const fx_hazard *h, uint32_t block) { return h->tag[block] & 1; }
static inline void fx_set_entry(fx_hazard *h, uint32_t block, uint32_t entry) {
  h->tag[block] = entry << 1 | (h->tag[block] & 1);
}
static inline uint32_t fx_held(const fx_run *run) { return run->high - run->low; }
static inline int fx_is_held(const fx_hazard *h, uint32_t entry) {
  return h->depth[entry] < h->run[h->run_of[entry]].high;
}
static inline uint32_t fx_parent(const fx_hazard *h, uint32_t entry) {
  return h->linked[entry] ? entry - 1 : h->parent[entry];
}
static inline uint32_t fx_piece_end(const fx_hazard *h, uint32_t piece) {
  return h->path[piece].depth + h->path[piece].count;
}
static inline uint32_t fx_least(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* hazard_entries.c */
uint32_t fx_entry_find(const fx_hazard *h, uint32_t parent, const uint64_t *key);
uint32_t fx_entries_same(const fx_hazard *h, uint32_t entry, const uint64_t *keys, uint32_t n);
void fx_entries_new(fx_hazard *h, const uint64_t *keys, uint32_t n);
void fx_entries_forget(fx_hazard *h, uint32_t first, uint32_t n);
uint32_t fx_piece_up(const fx_hazard *h, uint32_t last, uint32_t n, uint32_t *first);
uint32_t fx_count_here(const fx_hazard *h, uint32_t first, uint32_t n);
uint32_t fx_path_at(const fx_hazard *h, uint32_t depth);
uint32_t fx_path_here(const fx_hazard *h, uint32_t from, uint32_t to);
uint32_t fx_run_at(const fx_hazard *h, const fx_run *run, uint32_t depth);

/* hazard_books.c */
void fx_ghosts_add(fx_hazard *h, uint32_t run, uint32_t count);
void fx_ghosts_take(fx_hazard *h, uint32_t run, uint32_t count);
void fx_ghosts_trim(fx_hazard *h, uint32_t limit);
uint32_t fx_run_new(fx_hazard *h, uint32_t prompt, uint32_t class, uint32_t low, uint32_t end);
void fx_run_release(fx_hazard *h, uint32_t run);
void fx_offer(fx_hazard *h, uint32_t run);
void fx_withdraw(fx_hazard *h, uint32_t run);
void fx_price(fx_hazard *h, fx_candidates *of);
uint32_t fx_prompt_new(fx_hazard *h);
void fx_prompt_release(fx_hazard *h, uint32_t prompt);
uint32_t fx_lru_use(fx_hazard *h, uint32_t prompt, uint32_t known, uint32_t n, int insert);

/* hazard_path.c */
void fx_path_keys(fx_hazard *h, const uint64_t *keys, uint32_t n);
void fx_path_blocks(fx_hazard *h, const uint32_t *blocks, uint32_t n);
void fx_path_learn(fx_hazard *h, int by_put);
uint32_t fx_path_runs(fx_hazard *h, uint32_t prompt, int continues, int64_t answer, int by_put);

/* hazard.c */
uint32_t fx_shorten(fx_hazard *h, uint32_t run, uint32_t want);

/* hazard_guard.c */
int fx_judge(fx_hazard *h, uint32_t n, uint32_t hits, uint32_t lru_hits);
void fx_switch(fx_hazard *h);
void fx_look_around(fx_hazard *h);
#endif
