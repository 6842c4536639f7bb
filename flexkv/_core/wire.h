/* wire: blocks between a socket and the arena. Behind each block follows its checksum (8 bytes, little-endian), which
 * both sides take piece by piece, while the bytes are in the cache of whoever moves them. */
#ifndef FX_WIRE_H
#define FX_WIRE_H
#include <stdint.h>

typedef struct fx_passage fx_passage;

/* Blocks of `size` bytes on their way out of or into arena `slots` (base + slot * stride), in this order. sums[i]
 * becomes the checksum of block i as it lies here, seeded by its key (keys: 2 x uint64 each); a receiver finds in
 * told[i] what the sender says. No array is copied. NULL and errno on failure. */
fx_passage *fx_passage_open(uint64_t base, uint64_t stride, const uint32_t *slots, uint64_t size, const uint64_t *keys,
                            uint32_t n, uint64_t *sums, uint64_t *told);
void fx_passage_close(fx_passage *passage);
uint64_t fx_passage_moved(fx_passage *passage); /* bytes so far, checksums included */

/* Move on over a socket that does not block: 1 when all is moved, 0 when `most` bytes were, -EAGAIN when the socket
 * stood still for patience_ms, -ENODATA when the other side has ended, else -errno. */
int fx_passage_send(fx_passage *passage, int fd, uint64_t most, int patience_ms);
int fx_passage_receive(fx_passage *passage, int fd, uint64_t most, int patience_ms);
#endif
