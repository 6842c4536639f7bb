/* hash: chained 128-bit block keys.
 *
 * Every block of tokens is hashed by itself (XXH3-128 under a secret), so the blocks of a prompt are independent work
 * for the CPU; a short keyed mix then chains them: key[i] = P(key[i-1] ^ hash[i]), as CBC-MAC does with a cipher.
 * P is a two-round Feistel network whose round function is one secret 64 x 64 -> 128-bit multiply, folded. It is a
 * bijection, so a step loses nothing: prompts with one prefix share a key only if two block hashes collide, prompts
 * that differ earlier only if two 128-bit values that depend on the secret happen to cancel (about 2^-128 a pair; a
 * billion blocks are 2^59 pairs). None of this is a cryptographic claim: where tenants are hostile to each other and
 * may learn keys, `key_hash="sha256"` is the answer. */
#ifndef FX_HASH_H
#define FX_HASH_H
#include <stdint.h>

/* Bytes of `secret`: 192 for XXH3, then four 64-bit words for the chain (two whitening words, two multipliers). */
uint32_t fx_hash_secret_bytes(void);

/* keys[2i], keys[2i+1] = low and high half of block i's key. `root` (two words) stands before the first block.
 * Tokens are non-negative and 4 or 8 bytes wide; equal ids give equal keys whatever the width. */
void fx_hash_chain(const void *tokens, uint32_t token_bytes, uint32_t tokens_per_block, uint32_t blocks,
                   const uint8_t *secret, const uint64_t *root, uint64_t *keys);

/* 1 if any of the n tokens is negative. */
int fx_tokens_negative(const void *tokens, uint32_t token_bytes, uint64_t n);
#endif
