/* holders: who holds the blocks of a tier that lies on other machines.
 *
 * A row is a slot of that tier: a block, and up to FX_HOLDERS holders, each with its media as bits. Rows are found by
 * key. A block's parent has a row, too: one that nobody holds any more stays, unreadable (LANDING in the tier), while
 * it has children there, and leaves with the last of them. Holders are small numbers below FX_NOBODY. */
#ifndef FX_HOLDERS_H
#define FX_HOLDERS_H
#include <stdint.h>

#include "index.h"

enum { FX_HOLDERS = 8, FX_NOBODY = 65535 };

typedef struct fx_holders fx_holders;

typedef struct {
  uint16_t who;
  uint8_t media; /* bits; of answers: one medium's number */
  uint8_t spare;
} fx_holding;

/* The tier becomes one that gives its blocks no protection and needs none: see fx_evictable. NULL without memory. */
fx_holders *fx_holders_open(fx_index *index, uint32_t tier, uint32_t rows);
void fx_holders_close(fx_holders *holders);
void fx_holders_clear(fx_holders *holders); /* goes with fx_index_clear */
const uint32_t *fx_holders_counts(const fx_holders *holders); /* rows by holder, FX_NOBODY + 1 numbers */

/* `who` holds these, each on media[i]. `blocks` lists those with a row, and parents of the others, whose positions go
 * to `missing`. counts: blocks, missing, those with no room for one more holder. */
void fx_holders_join(fx_holders *holders, uint32_t who, const uint64_t *keys, const uint64_t *parents,
                     const uint8_t *media, uint32_t n, uint32_t *blocks, uint32_t *missing, uint32_t *counts);
/* Make rows for the keys at these positions, ancestors first, with slots[0..]; `blocks` lists them, READY. Returns how
 * many; the others have a row by now, or (counted in *orphans) no parent with a row. */
int64_t fx_holders_add(fx_holders *holders, uint32_t who, const uint64_t *keys, const uint64_t *parents,
                       const uint8_t *media, const uint32_t *at, uint32_t n, const uint32_t *slots, uint32_t *blocks,
                       uint32_t *orphans);
/* `who` holds them on media[i] no more. Returns how many it held. */
uint32_t fx_holders_part(fx_holders *holders, uint32_t who, const uint64_t *keys, const uint8_t *media, uint32_t n);
/* Nobody holds these blocks any more. Returns how many had a row. */
uint32_t fx_holders_forget(fx_holders *holders, const uint32_t *blocks, uint32_t n);
/* Take gone[who] off what each holder holds, in rows `from`.. of which at most `limit` leave; the next row to look at,
 * 0 when all have been. */
uint32_t fx_holders_sweep(fx_holders *holders, const uint8_t *gone, uint32_t from, uint32_t rows, uint32_t limit);

/* FX_HOLDERS for each slot, cheapest medium first, numbers[who] instead of who; what is `gone` is not there. The last
 * one may be of the medium `shared` although the same number comes before. */
void fx_holders_of(const fx_holders *holders, const uint32_t *slots, uint32_t n, const uint16_t *numbers,
                   const uint8_t *gone, uint32_t shared, fx_holding *found);
/* Slots that rows have left and that no pin of their blocks keeps, of the first `limit` waiting. Returns how many. */
uint32_t fx_holders_collect(fx_holders *holders, uint32_t *slots, uint32_t limit);
uint32_t fx_holders_waiting(const fx_holders *holders);

const char *fx_holders_check(const fx_holders *holders); /* NULL, or what is wrong: a full scan */
#endif
