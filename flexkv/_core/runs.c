/* The run allocator: boundary tags, size bins, a bitmap that knows what is out. */
#define _GNU_SOURCE
#include "runs.h"

#include <stdlib.h>
#include <string.h>

#include "pages.h"

#define NONE 0xFFFFFFFFu
#define BINS 128 /* four per power of two */
#define FIT_TRIES 8

typedef struct {
  uint32_t size;       /* of a free run: valid at its first and at its last integer */
  uint32_t next, prev; /* neighbours in its bin: valid at its first integer */
  uint32_t unused;
} run_tag;

struct fx_runs {
  uint32_t capacity, free;
  uint64_t *out; /* bitmap: 1 = taken */
  run_tag *tag;
  size_t tag_bytes;
  uint64_t filled[BINS / 64]; /* bins that hold a run */
  uint32_t bin[BINS];
};


/* Bin of a length: its power of two and the next two bits below. */
static inline unsigned bin_of(uint32_t count) {
  unsigned log = 31u - (unsigned)__builtin_clz(count);
  unsigned quarter = (log >= 2 ? count >> (log - 2) : count << (2 - log)) & 3;
  return log * 4 + quarter;
}

static inline int is_out(const fx_runs *runs, uint32_t at) { return (int)(runs->out[at / 64] >> (at % 64) & 1); }

/* Set (or clear) the bits [start, start + count); returns how many had that value before. */
static uint32_t mark(fx_runs *runs, uint32_t start, uint32_t count, int taken) {
  uint32_t had = 0;
  while (count) {
    uint32_t bit = start % 64, span = 64 - bit < count ? 64 - bit : count;
    uint64_t mask = (span == 64 ? ~0ull : (1ull << span) - 1) << bit;
    uint64_t *word = &runs->out[start / 64];
    had += (uint32_t)__builtin_popcountll((taken ? *word : ~*word) & mask);
    *word = taken ? *word | mask : *word & ~mask;
    start += span;
    count -= span;
  }
  return had;
}

static int all_out(const fx_runs *runs, uint32_t start, uint32_t count) {
  while (count) {
    uint32_t bit = start % 64, span = 64 - bit < count ? 64 - bit : count;
    uint64_t mask = (span == 64 ? ~0ull : (1ull << span) - 1) << bit;
    if ((runs->out[start / 64] & mask) != mask) return 0;
    start += span;
    count -= span;
  }
  return 1;
}

static void link_run(fx_runs *runs, uint32_t start, uint32_t count) {
  unsigned bin = bin_of(count);
  uint32_t first = runs->bin[bin];
  runs->tag[start].size = runs->tag[start + count - 1].size = count;
  runs->tag[start].next = first;
  runs->tag[start].prev = NONE;
  if (first != NONE) runs->tag[first].prev = start;
  runs->bin[bin] = start;
  runs->filled[bin / 64] |= 1ull << (bin % 64);
}

static void unlink_run(fx_runs *runs, uint32_t start) {
  unsigned bin = bin_of(runs->tag[start].size);
  uint32_t next = runs->tag[start].next, prev = runs->tag[start].prev;
  if (next != NONE) runs->tag[next].prev = prev;
  if (prev != NONE) {
    runs->tag[prev].next = next;
  } else {
    runs->bin[bin] = next;
    if (next == NONE) runs->filled[bin / 64] &= ~(1ull << (bin % 64));
  }
}

static void empty_bins(fx_runs *runs) {
  memset(runs->filled, 0, sizeof runs->filled);
  for (unsigned i = 0; i < BINS; i++) runs->bin[i] = NONE;
}

fx_runs *fx_runs_open(uint32_t capacity) {
  fx_runs *runs = calloc(1, sizeof *runs);
  size_t count = capacity ? capacity : 1;
  if (!runs) return NULL;
  runs->capacity = runs->free = capacity;
  runs->out = calloc((count + 63) / 64, sizeof *runs->out);
  runs->tag_bytes = count * sizeof *runs->tag;
  runs->tag = fx_pages_map(runs->tag_bytes);
  if (!runs->out || !runs->tag) {
    fx_runs_close(runs);
    return NULL;
  }
  empty_bins(runs);
  if (capacity) link_run(runs, 0, capacity);
  return runs;
}

void fx_runs_close(fx_runs *runs) {
  if (!runs) return;
  free(runs->out);
  fx_pages_unmap(runs->tag, runs->tag_bytes);
  free(runs);
}

uint32_t fx_runs_free(const fx_runs *runs) { return runs->free; }

/* The first free run that is worth `count`: one of the same bin that is long enough, else the shortest longer bin,
 * else (nothing holds `count`) the longest bin. */
static uint32_t choose(const fx_runs *runs, uint32_t count) {
  unsigned bin = bin_of(count);
  uint32_t run = runs->bin[bin];
  for (int i = 0; i < FIT_TRIES && run != NONE; i++, run = runs->tag[run].next)
    if (runs->tag[run].size >= count) return run;
  for (unsigned word = (bin + 1) / 64; word < BINS / 64; word++) {
    uint64_t longer = runs->filled[word];
    if (word == (bin + 1) / 64) longer &= ~0ull << ((bin + 1) % 64);
    if (longer) return runs->bin[word * 64 + (unsigned)__builtin_ctzll(longer)];
  }
  for (unsigned word = BINS / 64; word-- > 0;)
    if (runs->filled[word]) return runs->bin[word * 64 + 63 - (unsigned)__builtin_clzll(runs->filled[word])];
  return NONE;
}

/* Cut up to `count` integers off the front of a free run. */
static uint32_t cut(fx_runs *runs, uint32_t start, uint32_t count) {
  uint32_t size = runs->tag[start].size, got = size < count ? size : count;
  unlink_run(runs, start);
  if (got < size) link_run(runs, start + got, size - got);
  mark(runs, start, got, 1);
  runs->free -= got;
  return got;
}

uint32_t fx_runs_take_run(fx_runs *runs, uint32_t count, uint32_t near, uint32_t *start) {
  if (!count || !runs->free) return 0;
  /* A free integer whose left neighbour is taken begins a run. */
  int begins = near < runs->capacity && !is_out(runs, near) && (near == 0 || is_out(runs, near - 1));
  *start = begins ? near : choose(runs, count);
  return cut(runs, *start, count);
}

int fx_runs_take(fx_runs *runs, uint32_t count, uint32_t near, uint32_t *taken) {
  if (count > runs->free) return -1;
  for (uint32_t start, got; count; count -= got, near = NONE) {
    got = fx_runs_take_run(runs, count, near, &start);
    for (uint32_t i = 0; i < got; i++) *taken++ = start + i;
  }
  return 0;
}

int fx_runs_give_run(fx_runs *runs, uint32_t start, uint32_t count) {
  if (!count) return 0;
  if (start >= runs->capacity || count > runs->capacity - start || !all_out(runs, start, count)) return -1;
  mark(runs, start, count, 0);
  runs->free += count;
  uint32_t end = start + count;
  if (end < runs->capacity && !is_out(runs, end)) {
    count += runs->tag[end].size;
    unlink_run(runs, end);
  }
  if (start && !is_out(runs, start - 1)) {
    uint32_t left = runs->tag[start - 1].size;
    unlink_run(runs, start - left);
    start -= left;
    count += left;
  }
  link_run(runs, start, count);
  return 0;
}

int fx_runs_give(fx_runs *runs, const uint32_t *given, uint32_t count) {
  for (uint32_t i = 0; i < count;) {
    uint32_t length = 1, start = given[i];
    if (i + 1 < count && given[i + 1] == start - 1) { /* leaves first: blocks of a chain come back in reverse */
      while (i + length < count && start && given[i + length] == start - 1) start--, length++;
    } else {
      while (i + length < count && given[i + length] == start + length) length++;
    }
    if (fx_runs_give_run(runs, start, length)) return -1;
    i += length;
  }
  return 0;
}

void fx_runs_prefetch(const fx_runs *runs, uint32_t at) { __builtin_prefetch(&runs->tag[at], 1); }

/* Rebuild bins and tags from the bitmap. */
static void relink(fx_runs *runs) {
  uint32_t at = 0;
  empty_bins(runs);
  while (at < runs->capacity) {
    uint64_t word = runs->out[at / 64] >> (at % 64);
    if (word & 1) { /* skip what is taken */
      uint32_t ones = ~word ? (uint32_t)__builtin_ctzll(~word) : 64;
      at += ones < 64 - at % 64 ? ones : 64 - at % 64;
      continue;
    }
    uint32_t start = at;
    while (at < runs->capacity) {
      word = runs->out[at / 64] >> (at % 64);
      uint32_t rest = 64 - at % 64, zeros = word ? (uint32_t)__builtin_ctzll(word) : rest;
      at += zeros;
      if (zeros < rest) break;
    }
    if (at > runs->capacity) at = runs->capacity;
    link_run(runs, start, at - start);
  }
}

int fx_runs_reserve(fx_runs *runs, const uint32_t *wanted, uint32_t count) {
  uint32_t done = 0;
  while (done < count && wanted[done] < runs->capacity && !is_out(runs, wanted[done])) {
    mark(runs, wanted[done], 1, 1);
    done++;
  }
  if (done < count) { /* undo: the first `done` were distinct and free */
    for (uint32_t i = 0; i < done; i++) mark(runs, wanted[i], 1, 0);
    return -1;
  }
  if (count) relink(runs);
  runs->free -= count;
  return 0;
}

const char *fx_runs_check(const fx_runs *runs) {
  uint32_t free_count = 0, found = 0, listed = 0;
  for (uint32_t at = 0; at < runs->capacity;) {
    if (is_out(runs, at)) {
      at++;
      continue;
    }
    uint32_t size = runs->tag[at].size;
    if (!size || size > runs->capacity - at || runs->tag[at + size - 1].size != size) return "a run has wrong tags";
    for (uint32_t i = 0; i < size; i++)
      if (is_out(runs, at + i)) return "a free run holds a taken integer";
    found++;
    free_count += size;
    at += size;
    if (at < runs->capacity && !is_out(runs, at)) return "two free runs touch";
  }
  if (free_count != runs->free) return "the free count is wrong";
  for (unsigned bin = 0; bin < BINS; bin++) {
    uint32_t before = NONE;
    if ((runs->bin[bin] != NONE) != (runs->filled[bin / 64] >> (bin % 64) & 1)) return "a bin's flag is wrong";
    for (uint32_t run = runs->bin[bin]; run != NONE; before = run, run = runs->tag[run].next, listed++) {
      if (listed > found) return "a bin's list is endless";
      if (is_out(runs, run) || bin_of(runs->tag[run].size) != bin || runs->tag[run].prev != before) return "a bin is wrong";
    }
  }
  return listed == found ? NULL : "a free run is in no bin";
}
