/* hazard: a cache of keys that learns what to keep, beside an exact LRU of the same size.
 *
 * It is told of every prompt and decides which of its blocks a tier should hold; the tier follows as far as it may.
 * All its decisions are made on keys, so pins, failures and bytes on their way do not disturb them. Names:
 *   entry    what is known of one block: held by the model, or a ghost (remembered, at most 4 x capacity)
 *   run      entries of one prompt that were used about as often; class and last use are the run's
 *   block    the number a block has in the index, where it is in the tier as well
 * A prompt touches a whole path, so what was last used by a prompt is one suffix of its path: runs shrink at their head
 * when a later prompt takes the prefix over, at their tail when blocks leave, never in the middle. Nearly everything is
 * therefore kept by run, and done by run.
 * Whether the tier follows the learned order or LRU is decided by the hits of both, see `fx_hazard_put`. */
#ifndef FX_HAZARD_H
#define FX_HAZARD_H
#include <stdint.h>

typedef struct fx_hazard fx_hazard;

typedef struct {
  uint32_t used, ghosts, entries, runs, classes;
  uint32_t following; /* 1: the tier follows what was learned, 0: LRU */
  uint64_t prompts, hits, lru_hits, switches;
  double lead; /* blocks by which the learned order is ahead, within its limits */
  uint64_t memory_bytes; /* reserved; pages never written to cost nothing */
} fx_hazard_state;

/* `sabotage` keeps what should leave and the other way round, for tests of the guard. NULL: no memory. */
fx_hazard *fx_hazard_open(uint32_t capacity, uint32_t max_blocks, int sabotage);
void fx_hazard_close(fx_hazard *hazard);

/* A prompt of n blocks is put at `now` (seconds); `output_tokens` of its answer, negative: unknown; the numbers of the
 * first `known` of them. Returns how many, from the first, should come: those worth holding, and more while the tier has
 * room that they do not need; n while LRU is followed. `*unwanted`: how many blocks of the tier it should not hold any
 * longer, see fx_hazard_unwanted. */
uint32_t fx_hazard_put(fx_hazard *hazard, const uint64_t *keys, uint32_t n, double now, int64_t output_tokens,
                       const uint32_t *blocks, uint32_t known, uint32_t *unwanted);

/* The blocks that the tier should not hold any longer, leaves first, each told once: those of the latest put. */
const uint32_t *fx_hazard_unwanted(const fx_hazard *hazard);

/* The numbers of n blocks of the prompt put last, from `first` on; 0xFFFFFFFF where there is none. */
void fx_hazard_placed(fx_hazard *hazard, const uint32_t *blocks, uint32_t first, uint32_t n);

/* Blocks (a prefix, in prompt order) were used: by the put of just now, or read; a put of the same blocks that follows
 * counts as the same use then. Returns as fx_hazard_wanted does. */
uint32_t fx_hazard_used(fx_hazard *hazard, const uint32_t *blocks, uint32_t n, double now, uint8_t *wanted);

/* Blocks came into the tier (returns as fx_hazard_wanted does), or left it. */
uint32_t fx_hazard_came(fx_hazard *hazard, const uint32_t *blocks, uint32_t n, uint8_t *wanted);
void fx_hazard_left(fx_hazard *hazard, const uint32_t *blocks, uint32_t n);

/* Which of the blocks are to be held: wanted[i] = 1. Returns how many: n (and says no more) while LRU is
 * followed. */
uint32_t fx_hazard_wanted(const fx_hazard *hazard, const uint32_t *blocks, uint32_t n, uint8_t *wanted);

/* Forget every entry; what was learned stays. */
void fx_hazard_clear(fx_hazard *hazard);

/* Why a block stands where it does: class and last use of its run; 0 if nothing is known of it. `traits` are the codes
 * of the class and those above it, root first, `depth` of them (at most 4). */
typedef struct {
  uint32_t held, uses, depth, traits[4];
  double last_use, value, hazard; /* reuses per second that keeping it offers; share of its age bin reused */
} fx_hazard_reason;
int fx_hazard_explain(const fx_hazard *hazard, uint32_t block, double now, fx_hazard_reason *reason);

void fx_hazard_look(const fx_hazard *hazard, fx_hazard_state *state);

/* NULL, or what is wrong (a full scan). */
const char *fx_hazard_check(const fx_hazard *hazard);
#endif
