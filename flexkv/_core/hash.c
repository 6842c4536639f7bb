/* Chained block keys; see hash.h for what they promise. */
#include "hash.h"

#include <string.h>
#include <xxhash.h>

#define XXH_SECRET_BYTES 192
#define CHAIN_WORDS 4
/* Blocks this large are unusual; larger ones are narrowed in pieces through a streaming hash. */
#define NARROW_TOKENS 512

typedef struct {
  uint64_t lo, hi;
} pair;

typedef struct {
  uint64_t white[2], multiplier[2];
} chain_secret;

uint32_t fx_hash_secret_bytes(void) { return XXH_SECRET_BYTES + CHAIN_WORDS * 8; }

static inline uint64_t fold(uint64_t value, uint64_t multiplier) {
  unsigned __int128 product = (unsigned __int128)value * multiplier;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* One step of the chain: a keyed permutation of (previous ^ hash). */
static inline pair chain(pair previous, XXH128_hash_t hash, const chain_secret *secret) {
  uint64_t left = previous.lo ^ hash.low64, right = previous.hi ^ hash.high64;
  left ^= fold(right ^ secret->white[0], secret->multiplier[0]);
  right ^= fold(left ^ secret->white[1], secret->multiplier[1]);
  return (pair){left, right};
}

/* Copy `n` 8-byte tokens to 4 bytes each; returns nonzero if one of them does not fit. */
static inline uint64_t narrow(const uint64_t *tokens, uint32_t n, uint32_t *target) {
  uint64_t seen = 0;
  for (uint32_t i = 0; i < n; i++) {
    seen |= tokens[i];
    target[i] = (uint32_t)tokens[i];
  }
  return seen >> 32;
}

/* The hash of a block of 8-byte tokens is that of its 4-byte form; only ids above 32 bits need the long form, which
 * differs in length and in one flipped half, so that the two forms never meet. */
static XXH128_hash_t hash_wide(const uint64_t *tokens, uint32_t n, const uint8_t *secret) {
  XXH128_hash_t hash = XXH3_128bits_withSecret(tokens, (size_t)n * 8, secret, XXH_SECRET_BYTES);
  hash.high64 = ~hash.high64;
  return hash;
}

static XXH128_hash_t hash_long_block(const uint64_t *tokens, uint32_t n, const uint8_t *secret) {
  uint32_t piece[NARROW_TOKENS];
  XXH3_state_t state;
  XXH3_INITSTATE(&state);
  XXH3_128bits_reset_withSecret(&state, secret, XXH_SECRET_BYTES);
  for (uint32_t at = 0; at < n; at += NARROW_TOKENS) {
    uint32_t count = n - at < NARROW_TOKENS ? n - at : NARROW_TOKENS;
    if (narrow(tokens + at, count, piece)) return hash_wide(tokens, n, secret);
    XXH3_128bits_update(&state, piece, (size_t)count * 4);
  }
  return XXH3_128bits_digest(&state);
}

static inline XXH128_hash_t hash_block8(const uint64_t *tokens, uint32_t n, const uint8_t *secret) {
  uint32_t piece[NARROW_TOKENS];
  if (n > NARROW_TOKENS) return hash_long_block(tokens, n, secret);
  if (narrow(tokens, n, piece)) return hash_wide(tokens, n, secret);
  return XXH3_128bits_withSecret(piece, (size_t)n * 4, secret, XXH_SECRET_BYTES);
}

/* `per_block` is a constant at the call that matters (16), so that the compiler unrolls the narrowing and the hash. */
static inline __attribute__((always_inline)) void hash_chain(const void *tokens, uint32_t token_bytes,
                                                             uint32_t per_block, uint32_t blocks,
                                                             const uint8_t *secret, const uint64_t *root,
                                                             uint64_t *keys) {
  chain_secret words;
  memcpy(&words, secret + XXH_SECRET_BYTES, sizeof words);
  pair key = {root[0], root[1]};
  const uint8_t *at = tokens;
  for (uint32_t i = 0; i < blocks; i++, at += (size_t)per_block * token_bytes) {
    XXH128_hash_t hash = token_bytes == 4
                             ? XXH3_128bits_withSecret(at, (size_t)per_block * 4, secret, XXH_SECRET_BYTES)
                             : hash_block8((const uint64_t *)at, per_block, secret);
    key = chain(key, hash, &words);
    keys[2 * i] = key.lo;
    keys[2 * i + 1] = key.hi;
  }
}

void fx_hash_chain(const void *tokens, uint32_t token_bytes, uint32_t tokens_per_block, uint32_t blocks,
                   const uint8_t *secret, const uint64_t *root, uint64_t *keys) {
  if (tokens_per_block == 16 && token_bytes == 4)
    hash_chain(tokens, 4, 16, blocks, secret, root, keys);
  else if (tokens_per_block == 16)
    hash_chain(tokens, 8, 16, blocks, secret, root, keys);
  else
    hash_chain(tokens, token_bytes, tokens_per_block, blocks, secret, root, keys);
}

int fx_tokens_negative(const void *tokens, uint32_t token_bytes, uint64_t n) {
  if (token_bytes == 4) {
    const uint32_t *narrow_tokens = tokens;
    uint32_t seen = 0;
    for (uint64_t i = 0; i < n; i++) seen |= narrow_tokens[i];
    return (int)(seen >> 31);
  }
  const uint64_t *wide_tokens = tokens;
  uint64_t seen = 0;
  for (uint64_t i = 0; i < n; i++) seen |= wide_tokens[i];
  return (int)(seen >> 63);
}
