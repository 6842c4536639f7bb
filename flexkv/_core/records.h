/* records: the 64-byte entries that say what each slot of the disk tier holds (little-endian on disk). */
#ifndef FX_RECORDS_H
#define FX_RECORDS_H
#include <stdint.h>
#include "crew.h"

typedef struct {
  uint64_t key[2];
  uint64_t parent[2];
  uint64_t sequence; /* grows with every commit; of two records of one key the higher one counts */
  uint32_t depth;
  uint32_t size;     /* bytes of the block that the checksum covers */
  uint64_t checksum; /* XXH3-64 of the block, seeded by its key */
  uint32_t flags;
  uint32_t check; /* over the 60 bytes before, the slot and the seed of the directory */
} fx_record;

/* Fill in `check` of records[i], which belongs into slot slots[i] of the directory with seed seeds[i]. */
void fx_records_seal(fx_record *records, const uint32_t *slots, const uint64_t *seeds, uint32_t n);

/* states[i] of slot first + i: 0 empty (all zero), 1 good, 2 damaged. Returns the number of damaged ones. */
uint32_t fx_records_check(const fx_record *records, uint32_t first, uint32_t n, uint64_t seed, uint8_t *states);

/* Write records[i] into file fds[i] at offsets[i], now; neighbours in one file go out together.
 * results[i] becomes 0 or -errno. Returns the number that failed. */
uint32_t fx_records_write(uint32_t n, const int32_t *fds, const uint64_t *offsets, const fx_record *records,
                          int32_t *results);
/* The same on the crew as ONE part of `ticket`. Inputs are copied; `results` must outlive the ticket.
 * Returns 0, -EAGAIN when the queue is full, -ENOMEM. */
int fx_crew_write_records(fx_crew *crew, uint32_t n, const int32_t *fds, const uint64_t *offsets,
                          const fx_record *records, int32_t *results, uint64_t ticket);
#endif
