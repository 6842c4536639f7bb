/* The path of a prompt: which of its entries are known, what its use teaches about them, and the runs that it makes. */
#include <string.h>

#include "hazard_impl.h"

/* ---- what is known of it ---- */

/* How many of n neighbours that are one below the other, from the first, are of its run. A run is one stretch of a
 * path, so that all are if the last one is. */
static uint32_t of_one_run(const fx_hazard *h, uint32_t entry, uint32_t depth, uint32_t n) {
  const uint32_t *run_of = h->run_of + entry;
  uint32_t same = 1;
  n = fx_least(n, h->run[run_of[0]].end - depth);
  if (run_of[n - 1] == run_of[0]) return n;
  while (run_of[same] == run_of[0]) same++;
  return same;
}

/* n more entries, neighbours that are one below the other, are known of the path: pieces of one run each. */
static void extend(fx_hazard *h, uint32_t entry, uint32_t n) {
  for (uint32_t some; n; n -= some, entry += some) {
    some = of_one_run(h, entry, h->known, n);
    h->path[h->pieces++] = (fx_piece){entry, h->known, some};
    h->known += some;
  }
}

void fx_path_keys(fx_hazard *h, const uint64_t *keys, uint32_t n) {
  uint32_t above = FX_NONE;
  while (h->known < n) {
    uint32_t entry = fx_entry_find(h, above, keys + 2 * (size_t)h->known);
    if (entry == FX_NONE) break;
    uint32_t some = fx_entries_same(h, entry, keys + 2 * (size_t)h->known, n - h->known);
    extend(h, entry, some);
    above = entry + some - 1;
  }
}

void fx_path_blocks(fx_hazard *h, const uint32_t *blocks, uint32_t n) {
  uint32_t above = FX_NONE;
  while (h->known < n) {
    uint32_t entry = fx_entry_of(h, blocks[h->known]), some = 1;
    if (entry == FX_NO_ENTRY || fx_parent(h, entry) != above) break;
    while (h->known + some < n && h->linked[entry + some] && fx_entry_of(h, blocks[h->known + some]) == entry + some) some++;
    extend(h, entry, some);
    above = entry + some - 1;
  }
}

/* ---- what its use teaches, and its runs ---- */

static void used_again(fx_hazard *h, const fx_piece *piece) {
  uint8_t *uses = h->uses + piece->entry;
  for (uint32_t i = 0, count = piece->count; i < count; i++) uses[i] = (uint8_t)(uses[i] + (uses[i] < 255));
}

/* The known entries of the path leave their runs (and the ghosts). What is used the second time by a put, after it was
 * read for the same request, teaches nothing new. */
void fx_path_learn(fx_hazard *h, int by_put) {
  for (uint32_t i = 0, last; i < h->known_pieces; i = last) {
    uint32_t number = h->run_of[h->path[i].entry], start = h->path[i].depth;
    fx_run *run = &h->run[number];
    for (last = i + 1; last < h->known_pieces && h->run_of[h->path[last].entry] == number;) last++;
    uint32_t end = fx_piece_end(h, last - 1), count = end - start;
    if (!(by_put && run->read_only)) {
      const fx_turn *turn = &h->turn[number];
      uint32_t bin = fx_rates_bin(h->now - turn->last_use);
      fx_rates_reused(h->rates, run->class, bin, count);
      if (bin >= turn->next_bin) fx_rates_entered(h->rates, run->class, turn->next_bin, bin, count);
      for (uint32_t at = i; at < last; at++) used_again(h, &h->path[at]);
    }
    if (fx_held(run) && start) h->kids[fx_path_at(h, start - 1)]--;
    if (run->high < end) {
      fx_ghosts_take(h, number, end - run->high);
      run->high = end;
    }
    run->low = end;
    if (fx_held(run)) h->kids[fx_path_at(h, end - 1)]++;
    else fx_withdraw(h, number);
    if (run->low == run->end) fx_run_release(h, number);
  }
}

static uint32_t halvings(uint64_t value) { return value ? 63u - (uint32_t)__builtin_clzll(value) : 0; }

/* How many neighbours, from the first, were used about as often as it. */
static uint32_t used_alike(const uint8_t *uses, uint32_t n) {
  static const uint8_t lowest[] = {0, 1, 2, 3, 3, 5, 5, 5, 5}, highest[] = {0, 1, 2, 4, 4, 8, 8, 8, 8};
  uint32_t like = uses[0], same = 1;
  uint8_t low = like < 9 ? lowest[like] : like < 17 ? 9 : 17, high = like < 9 ? highest[like] : like < 17 ? 16 : 255;
  for (uint64_t eight, all = like * 0x0101010101010101u; same < n; same++) {
    for (; same + 8 <= n; same += 8) { /* mostly they were used exactly as often */
      memcpy(&eight, uses + same, sizeof eight);
      if (eight != all) break;
    }
    if (same < n && (uses[same] < low || uses[same] > high)) break;
  }
  return fx_least(same, n);
}

/* Whether two counts of uses are of one class: 0, 1, 2, 3-4, 5-8, 9-16, more. */
static int same_uses(uint32_t a, uint32_t b) {
  uint8_t pair[] = {(uint8_t)a, (uint8_t)b};
  return used_alike(pair, 2) == 2;
}

/* Give entries at depths [from, to), which begin in piece `*at`, to a run; *at becomes the piece of what follows. */
static void give(fx_hazard *h, uint32_t number, uint32_t from, uint32_t to, uint32_t *at) {
  for (;; ++*at) {
    const fx_piece *piece = &h->path[*at];
    uint32_t start = from > piece->depth ? from : piece->depth, end = fx_least(to, piece->depth + piece->count);
    uint32_t *run_of = h->run_of + piece->entry + (start - piece->depth), count = end - start;
    /* A run that was taken over as a whole mostly has the same number again; entries that are new say nothing. */
    if (*at >= h->known_pieces || run_of[0] != number || run_of[count - 1] != number)
      for (uint32_t i = 0; i < count; i++) run_of[i] = number;
    h->run[number].last = piece->entry + (end - 1 - piece->depth);
    if (end < to) continue;
    *at += end == piece->depth + piece->count;
    return;
  }
}

/* The depth up to which the path, from `start` in piece `at` on, was used about as often. */
static uint32_t stretch(const fx_hazard *h, uint32_t start, uint32_t at) {
  uint8_t like = h->uses[h->path[at].entry + (start - h->path[at].depth)];
  for (; at < h->pieces; at++) {
    const fx_piece *piece = &h->path[at];
    uint32_t skip = start > piece->depth ? start - piece->depth : 0, left = piece->count - skip;
    const uint8_t *uses = h->uses + piece->entry + skip;
    if (!same_uses(like, uses[0])) return piece->depth + skip;
    uint32_t same = used_alike(uses, left);
    if (same < left) return piece->depth + skip + same;
  }
  return h->length;
}

/* Cut the path where the number of uses changes class, and classify the pieces; see docs/hazard.md for the traits. */
uint32_t fx_path_runs(fx_hazard *h, uint32_t prompt, int continues, int64_t answer, int by_put) {
  uint32_t n = h->length, known = h->known, made = 0;
  uint32_t share = known <= 1 ? 0 : 2 * known < n ? 1 : 2;
  uint32_t kind = !known ? 0 : continues ? 3 : known == 1 ? 1 : 2;
  uint32_t news = n - known > 4, size = n < 4 ? 0 : n < 16 ? 1 : n < 64 ? 2 : 3;
  for (uint32_t i = 0, at = 0, end; i < n; i = end) {
    end = stretch(h, i, at);
    uint32_t base = (i < known) | share << 1 | (end == n) << 3 | (i < 2) << 4;
    uint32_t class = fx_rates_class(h->rates, 0, base);
    class = fx_rates_class(h->rates, class, news | kind << 1);
    class = fx_rates_class(h->rates, class, size);
    if (answer >= 0) {
      uint32_t level = halvings((uint64_t)answer + 1) / 2;
      class = fx_rates_class(h->rates, class, level < 7 ? level : 7);
    }
    uint32_t number = fx_run_new(h, prompt, class, i, end);
    h->run[number].read_only = (uint8_t)!by_put;
    give(h, number, i, end, &at);
    fx_rates_began(h->rates, end - i);
    h->fresh[made++] = number;
  }
  return made;
}
