/* records: sealing, checking and writing the slot records of the disk tier. */
#include "records.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "hub.h"

_Static_assert(sizeof(fx_record) == 64, "a record is one cache line, and never straddles a sector");

#define CHECKED_BYTES (sizeof(fx_record) - sizeof(uint32_t))
#define MERGE_RECORDS 1024 /* most records in one pwrite: 64 KiB */

/* The slot is part of the check, so that a record found in another slot than its own is damaged, and the seed
 * differs between directories and lives of a store, so that records of an earlier life are damaged too. */
static uint32_t check_of(const fx_record *record, uint32_t slot, uint64_t seed) {
  uint64_t hash = XXH3_64bits_withSeed(record, CHECKED_BYTES, seed + slot * 0x9E3779B97F4A7C15ull);
  return (uint32_t)(hash ^ (hash >> 32));
}

void fx_records_seal(fx_record *records, const uint32_t *slots, const uint64_t *seeds, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) records[i].check = check_of(&records[i], slots[i], seeds[i]);
}

uint32_t fx_records_check(const fx_record *records, uint32_t first, uint32_t n, uint64_t seed, uint8_t *states) {
  static const fx_record empty;
  uint32_t damaged = 0;
  for (uint32_t i = 0; i < n; i++) {
    if (memcmp(&records[i], &empty, sizeof empty) == 0) {
      states[i] = 0;
    } else if (records[i].check == check_of(&records[i], first + i, seed)) {
      states[i] = 1;
    } else {
      states[i] = 2;
      damaged++;
    }
  }
  return damaged;
}

/* Returns 0 or -errno; a short write is continued. */
static int write_all(int fd, const char *bytes, size_t size, uint64_t offset) {
  while (size > 0) {
    ssize_t moved = pwrite(fd, bytes, size, (off_t)offset);
    if (moved < 0) {
      if (errno == EINTR) continue;
      return -errno;
    }
    if (moved == 0) return -EIO;
    bytes += moved;
    offset += (uint64_t)moved;
    size -= (size_t)moved;
  }
  return 0;
}

uint32_t fx_records_write(uint32_t n, const int32_t *fds, const uint64_t *offsets, const fx_record *records,
                          int32_t *results) {
  uint32_t failed = 0;
  for (uint32_t i = 0, end; i < n; i = end) {
    for (end = i + 1; end < n && end - i < MERGE_RECORDS; end++)
      if (fds[end] != fds[i] || offsets[end] != offsets[end - 1] + sizeof(fx_record)) break;
    int result = write_all(fds[i], (const char *)&records[i], (end - i) * sizeof(fx_record), offsets[i]);
    for (uint32_t k = i; k < end; k++) results[k] = result;
    if (result) failed += end - i;
  }
  return failed;
}

typedef struct {
  uint64_t ticket;
  int32_t *results;
  const fx_record *records;
  const uint64_t *offsets;
  const int32_t *fds;
  uint32_t n;
} job;

/* Failed writes are told by `results`: the ticket itself lands, whatever became of its records. */
static void run_job(void *argument) {
  job *work = argument;
  uint64_t ticket = work->ticket;
  fx_records_write(work->n, work->fds, work->offsets, work->records, work->results);
  free(work);
  fx_complete((void *)(uintptr_t)ticket);
}

int fx_crew_write_records(fx_crew *crew, uint32_t n, const int32_t *fds, const uint64_t *offsets,
                          const fx_record *records, int32_t *results, uint64_t ticket) {
  size_t record_bytes = n * sizeof *records, offset_bytes = n * sizeof *offsets, fd_bytes = n * sizeof *fds;
  job *work = malloc(sizeof *work + record_bytes + offset_bytes + fd_bytes);
  if (!work) return -ENOMEM;
  char *room = (char *)(work + 1);
  work->ticket = ticket;
  work->results = results;
  work->n = n;
  work->records = memcpy(room, records, record_bytes);
  work->offsets = memcpy(room + record_bytes, offsets, offset_bytes);
  work->fds = memcpy(room + record_bytes + offset_bytes, fds, fd_bytes);
  int queued = fx_crew_run(crew, run_job, work);
  if (queued < 0) free(work);
  return queued;
}
