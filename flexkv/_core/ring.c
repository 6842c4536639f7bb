/* ring.c: see ring.h.
 *
 * job: a batch, with its own copy of the arrays.   op: one I/O of a job: an entry, or neighbours merged.
 * An op walks: free -> todo (wants a submission entry) -> prepared (has one) -> in the kernel -> free, or todo again
 * for the rest of a short I/O. The memory of an op belongs to the kernel until its completion arrives, so nothing
 * here is ever cancelled once it was submitted. */
#include "ring.h"

#include <errno.h>
#include <stddef.h>

#if FX_HAVE_URING
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_DEPTH 4096u
#define MAX_JOBS 4096u
#define MERGE_BYTES (1u << 20)
#define PIECE_BYTES (1ull << 30) /* what one registered buffer may have (io_uring_register(2)) */
#define MAX_PIECES (1u << 14)
#define MAX_RETRIES 1000u /* of -EAGAIN and -EINTR without progress */
#define FLUSH_ENTRIES 64u /* per submission: pinning pages for more would stall the loop */
#define FLUSH_BYTES (8u << 20) /* the same, for large I/Os: about 0.04 ms per MiB */
#define WRITE_TURN 8u     /* of that many ops one is a write, when reads wait too */

typedef struct job {
  struct job *next;
  uint64_t ticket;
  int32_t *results;
  uint32_t n, started, finished; /* entries */
  uint64_t due;                  /* see append */
  int mode, error;
  int32_t *fds;
  uint32_t *lengths;
  uint64_t *offsets, *addresses;
  uint64_t arrays[];
} job;

typedef struct {
  job *job;
  uint32_t first, count; /* entries of this I/O */
  uint32_t later;        /* entries after them, to be done one by one */
  uint32_t length, done; /* bytes of this I/O */
  uint32_t charged;      /* bytes counted in flight */
  uint32_t retries;
} op;

typedef struct {
  uint32_t *items, first, count;
} fifo; /* of op numbers; holds `depth` */

typedef struct {
  job *head, *tail;
  uint64_t served; /* bytes of all jobs so far */
} lane;

struct fx_ring {
  struct io_uring uring;
  uint32_t depth, used, in_kernel; /* ops */
  uint64_t bytes, max_bytes, queued;
  uint32_t jobs, turn;
  uint64_t base, size; /* registered memory, in pieces of PIECE_BYTES; size 0: none */
  int broken; /* errno after which nothing can be submitted any more, or 0 */
  int wake;   /* whether completed tickets must wake the loop */
  op *ops;
  fifo free, todo, prepared;
  lane lanes[2]; /* jobs with entries not started: reads, writes */
};

static void push(const fx_ring *ring, fifo *f, uint32_t item) {
  f->items[(f->first + f->count++) % ring->depth] = item;
}

static uint32_t pop(const fx_ring *ring, fifo *f) {
  uint32_t item = f->items[f->first];
  f->first = (f->first + 1) % ring->depth;
  f->count--;
  return item;
}

/* A job is due when the lane has served as many bytes more as it has itself, and the one that is due first is served, to
 * its end: a short job overtakes long ones, but a stream of short ones no longer than it takes to serve as many bytes
 * as the long one has, and of equal ones the first is there soonest. */
static void append(fx_ring *ring, job *j) {
  lane *l = &ring->lanes[j->mode & 1];
  job **at = &l->head;
  j->due = l->served;
  for (uint32_t i = 0; i < j->n; i++) j->due += j->lengths[i];
  if (l->tail && l->tail->due <= j->due) at = &l->tail->next;
  while (*at && (*at)->due <= j->due) at = &(*at)->next;
  j->next = *at;
  *at = j;
  if (!j->next) l->tail = j;
}

static job *take_head(lane *l) {
  job *j = l->head;
  l->head = j->next;
  if (!l->head) l->tail = NULL;
  return j;
}

int fx_ring_built(void) { return 1; }

int fx_ring_probe(void) {
  struct io_uring uring;
  int error = io_uring_queue_init(4, &uring, 0);
  if (error < 0) return error;
  struct io_uring_probe *probe = io_uring_get_probe_ring(&uring);
  int usable = probe && io_uring_opcode_supported(probe, IORING_OP_READ) &&
               io_uring_opcode_supported(probe, IORING_OP_WRITE);
  io_uring_free_probe(probe);
  io_uring_queue_exit(&uring);
  return usable ? 0 : -EOPNOTSUPP;
}

static void release(fx_ring *ring) {
  free(ring->ops);
  free(ring->free.items);
  free(ring);
}

fx_ring *fx_ring_open(fx_hub *hub, uint32_t depth, uint64_t max_bytes_in_flight) {
  if (depth == 0 || depth > MAX_DEPTH) {
    errno = EINVAL;
    return NULL;
  }
  fx_ring *ring = calloc(1, sizeof *ring);
  if (!ring) return NULL;
  ring->depth = depth;
  ring->max_bytes = max_bytes_in_flight;
  ring->ops = calloc(depth, sizeof *ring->ops);
  uint32_t *items = calloc(3 * (size_t)depth, sizeof *items);
  ring->free.items = items;
  int error = ring->ops && items ? io_uring_queue_init(depth, &ring->uring, 0) : -ENOMEM;
  if (!error) {
    error = io_uring_register_eventfd(&ring->uring, fx_hub_fd(hub));
    if (error) io_uring_queue_exit(&ring->uring);
  }
  if (error) {
    release(ring);
    errno = -error;
    return NULL;
  }
  ring->todo.items = items + depth;
  ring->prepared.items = items + 2 * (size_t)depth;
  for (uint32_t i = 0; i < depth; i++) push(ring, &ring->free, i);
  return ring;
}

int fx_ring_register(fx_ring *ring, uint64_t base, uint64_t size) {
  if (ring->size || size == 0 || size > MAX_PIECES * PIECE_BYTES) return -EINVAL;
  unsigned n = (unsigned)((size + PIECE_BYTES - 1) / PIECE_BYTES);
  struct iovec *pieces = calloc(n, sizeof *pieces);
  if (!pieces) return -ENOMEM;
  for (unsigned i = 0; i < n; i++) {
    uint64_t at = i * PIECE_BYTES, left = size - at;
    pieces[i] = (struct iovec){(void *)(uintptr_t)(base + at), left < PIECE_BYTES ? left : PIECE_BYTES};
  }
  int error = io_uring_register_buffers(&ring->uring, pieces, n);
  free(pieces);
  if (error) return error;
  ring->base = base;
  ring->size = size;
  return 0;
}

uint32_t fx_ring_in_flight(fx_ring *ring) { return ring->used; }

uint64_t fx_ring_queued(fx_ring *ring) { return ring->queued; }

int fx_ring_queue(fx_ring *ring, int mode, uint32_t n, const int32_t *fds, const uint64_t *offsets,
                  const uint64_t *addresses, const uint32_t *lengths, int32_t *results, uint64_t ticket) {
  if (ring->broken) return -ring->broken;
  for (uint32_t i = 0; i < n; i++)
    if (lengths[i] == 0 || lengths[i] > INT32_MAX) return -EINVAL;
  if (n == 0) {
    fx_settle(ticket, 0, 1);
    return 0;
  }
  if (ring->jobs == MAX_JOBS) return -EAGAIN;
  job *j = malloc(sizeof *j + n * (2 * sizeof(uint64_t) + sizeof(uint32_t) + sizeof(int32_t)));
  if (!j) return -ENOMEM;
  *j = (job){.ticket = ticket, .results = results, .n = n, .mode = mode};
  j->offsets = memcpy(j->arrays, offsets, n * sizeof *offsets);
  j->addresses = memcpy(j->offsets + n, addresses, n * sizeof *addresses);
  j->lengths = memcpy(j->addresses + n, lengths, n * sizeof *lengths);
  j->fds = memcpy(j->lengths + n, fds, n * sizeof *fds);
  ring->jobs++;
  ring->queued += n;
  append(ring, j);
  return 0;
}

/* --- results */

/* Record what became of an entry; the last one of a job settles the ticket and frees the job. */
static void record(fx_ring *ring, job *j, uint32_t entry, int32_t result) {
  j->results[entry] = result;
  if (!j->error && result < 0) j->error = -result;
  if (!j->error && (uint32_t)result < j->lengths[entry]) j->error = EIO;
  if (++j->finished < j->n) return;
  fx_settle(j->ticket, j->error, ring->wake);
  free(j);
  ring->jobs--;
}

static void free_op(fx_ring *ring, uint32_t number) {
  ring->bytes -= ring->ops[number].charged;
  ring->used--;
  push(ring, &ring->free, number);
}

/* Go on with the entry `first`, alone. */
static void restart_op(fx_ring *ring, uint32_t number, uint32_t first, uint32_t later) {
  op *o = &ring->ops[number];
  o->first = first;
  o->count = 1;
  o->later = later;
  o->length = o->job->lengths[first];
  o->done = o->retries = 0;
  push(ring, &ring->todo, number);
}

/* The I/O is over: hand its bytes out to its entries, in order. `error` is an errno or 0. */
static void finish_op(fx_ring *ring, uint32_t number, int error) {
  op *o = &ring->ops[number];
  job *j = o->job;
  uint32_t entry = o->first, end = o->first + o->count, left = o->done;
  for (; entry < end && left >= j->lengths[entry]; entry++) {
    left -= j->lengths[entry];
    if (entry + 1 == end && o->later == 0) free_op(ring, number); /* before the job may be freed */
    record(ring, j, entry, (int32_t)j->lengths[entry]);
  }
  if (entry == end) {
    if (o->later) restart_op(ring, number, end, o->later - 1);
    return;
  }
  if (error && o->count > 1) { /* which of the merged entries is to blame? */
    restart_op(ring, number, entry, end - entry - 1);
    return;
  }
  uint32_t later = o->later;
  if (later)
    restart_op(ring, number, end, later - 1);
  else
    free_op(ring, number);
  for (; entry < end; entry++, left = 0) record(ring, j, entry, error ? -error : (int32_t)left);
}

static void complete_op(fx_ring *ring, uint32_t number, int32_t result) {
  op *o = &ring->ops[number];
  int again = (result == -EAGAIN || result == -EINTR) && ++o->retries <= MAX_RETRIES;
  if (result > 0) {
    o->done += (uint32_t)result;
    o->retries = 0;
    again = o->done < o->length;
  }
  if (again)
    push(ring, &ring->todo, number);
  else
    finish_op(ring, number, result < 0 ? -result : 0);
}

/* --- starting */

/* Entries from `first` on that are neighbours in file and memory: one I/O. Returns their bytes. */
static uint32_t measure(const job *j, uint32_t first, uint32_t *count) {
  uint32_t length = j->lengths[first], i = first + 1;
  for (; i < j->n && j->fds[i] == j->fds[first]; i++) {
    int neighbours = j->offsets[i] == j->offsets[first] + length && j->addresses[i] == j->addresses[first] + length;
    if (!neighbours || (uint64_t)length + j->lengths[i] > MERGE_BYTES) break;
    length += j->lengths[i];
  }
  *count = i - first;
  return length;
}

/* Whose turn is it? Reads first, but writes get a share, or they would wait for ever under load. */
static lane *next_lane(fx_ring *ring) {
  lane *reads = &ring->lanes[0], *writes = &ring->lanes[1];
  if (reads->head && writes->head) return ++ring->turn % WRITE_TURN ? reads : writes;
  return reads->head ? reads : writes->head ? writes : NULL;
}

/* Start ops until depth or bytes are used up. */
static void start_ops(fx_ring *ring) {
  lane *l;
  while (ring->used < ring->depth && (l = next_lane(ring))) {
    job *j = l->head;
    uint32_t count, length = measure(j, j->started, &count);
    if (ring->used && ring->bytes + length > ring->max_bytes) return;
    uint32_t number = pop(ring, &ring->free);
    ring->ops[number] =
        (op){.job = j, .first = j->started, .count = count, .length = length, .charged = length};
    ring->used++;
    ring->bytes += length;
    ring->queued -= count;
    j->started += count;
    l->served += length;
    if (j->started == j->n) take_head(l);
    push(ring, &ring->todo, number);
  }
}

/* The registered piece that the whole range lies in, or -1. */
static int piece_of(const fx_ring *ring, uint64_t address, uint32_t length) {
  uint64_t at = address - ring->base; /* wraps to something large below the base */
  if (at >= ring->size || length > ring->size - at) return -1;
  uint64_t piece = at / PIECE_BYTES;
  return (at + length - 1) / PIECE_BYTES == piece ? (int)piece : -1;
}

static int prepare(fx_ring *ring, uint32_t number) {
  struct io_uring_sqe *entry = io_uring_get_sqe(&ring->uring);
  if (!entry) return 0; /* back-pressure: it stays in todo */
  op *o = &ring->ops[number];
  job *j = o->job;
  uint64_t address = j->addresses[o->first] + o->done, offset = j->offsets[o->first] + o->done;
  uint32_t length = o->length - o->done;
  int fd = j->fds[o->first], piece = piece_of(ring, address, length);
  void *memory = (void *)(uintptr_t)address;
  if (piece >= 0 && (j->mode & 1))
    io_uring_prep_write_fixed(entry, fd, memory, length, offset, piece);
  else if (piece >= 0)
    io_uring_prep_read_fixed(entry, fd, memory, length, offset, piece);
  else if (j->mode & 1)
    io_uring_prep_write(entry, fd, memory, length, offset);
  else
    io_uring_prep_read(entry, fd, memory, length, offset);
  if (j->mode & 2) entry->flags |= IOSQE_ASYNC;
  entry->user_data = number;
  return 1;
}

/* Fail everything that has not started. */
static void fail_queued(fx_ring *ring, int error) {
  for (int i = 0; i < 2; i++) {
    while (ring->lanes[i].head) {
      job *j = take_head(&ring->lanes[i]);
      uint32_t entry = j->started, n = j->n; /* the last record may free the job */
      ring->queued -= n - entry;
      for (; entry < n; entry++) record(ring, j, entry, -error);
    }
  }
}

/* The kernel will take nothing any more: fail what it does not have. */
static void break_ring(fx_ring *ring, int error) {
  ring->broken = error;
  fail_queued(ring, error);
  for (fifo *f = &ring->prepared; f; f = f == &ring->prepared ? &ring->todo : NULL) {
    for (uint32_t n = f->count; n > 0; n--) {
      uint32_t number = pop(ring, f);
      op o = ring->ops[number];
      free_op(ring, number);
      for (uint32_t i = 0; i < o.count + o.later; i++) record(ring, o.job, o.first + i, -error);
    }
  }
}

/* Returns 0, or -errno when the kernel took nothing and no completion will come to try again. */
static int flush(fx_ring *ring) {
  if (!ring->broken) start_ops(ring);
  uint64_t bytes = 0;
  while (ring->todo.count && ring->prepared.count < FLUSH_ENTRIES && bytes < FLUSH_BYTES && !ring->broken) {
    uint32_t number = ring->todo.items[ring->todo.first];
    bytes += ring->ops[number].length;
    if (!prepare(ring, number)) break;
    push(ring, &ring->prepared, pop(ring, &ring->todo));
  }
  if (ring->broken && ring->todo.count) break_ring(ring, ring->broken);
  if (!ring->prepared.count) return 0;
  int taken;
  do {
    taken = io_uring_submit(&ring->uring);
  } while (taken == -EINTR);
  for (int i = 0; i < taken; i++) pop(ring, &ring->prepared);
  if (taken > 0) ring->in_kernel += (uint32_t)taken;
  if (taken < 0 && taken != -EAGAIN && taken != -EBUSY) break_ring(ring, -taken);
  return ring->in_kernel || ring->broken ? 0 : taken < 0 ? taken : -EAGAIN;
}

static int reap(fx_ring *ring) {
  int total = 0;
  for (;;) {
    struct io_uring_cqe *completion;
    unsigned head, count = 0;
    io_uring_for_each_cqe(&ring->uring, head, completion) {
      ring->in_kernel--;
      complete_op(ring, (uint32_t)completion->user_data, completion->res);
      count++;
    }
    io_uring_cq_advance(&ring->uring, count);
    total += (int)count;
    if (!io_uring_cq_has_overflow(&ring->uring)) return total;
    if (io_uring_get_events(&ring->uring) < 0) return total;
  }
}

int fx_ring_submit(fx_ring *ring) {
  ring->wake = 1;
  return flush(ring);
}

int fx_ring_reap(fx_ring *ring) {
  ring->wake = 0; /* the caller drains the hub right after */
  int count = reap(ring);
  flush(ring);
  return count;
}

int fx_ring_close(fx_ring *ring) {
  int error = 0;
  uint32_t refusals = 0;
  ring->wake = 1;
  fail_queued(ring, ECANCELED);
  while (ring->used && !error) {
    int refused = flush(ring);
    if (refused && ++refusals > MAX_RETRIES) break_ring(ring, -refused);
    if (refused) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    struct io_uring_cqe *completion;
    if (ring->in_kernel) error = io_uring_wait_cqe(&ring->uring, &completion);
    if (error == -EINTR || error == -EAGAIN) error = 0;
    reap(ring);
  }
  if (ring->size) io_uring_unregister_buffers(&ring->uring); /* unpins now; leaving the ring would do it some time later */
  io_uring_queue_exit(&ring->uring);
  if (error) return error; /* the kernel may still hold ops: leak them rather than have it write to freed memory */
  release(ring);
  return 0;
}

#else /* without liburing the disk tier uses threads */

int fx_ring_built(void) { return 0; }

int fx_ring_probe(void) { return -ENOSYS; }

fx_ring *fx_ring_open(fx_hub *hub, uint32_t depth, uint64_t max_bytes_in_flight) {
  (void)hub, (void)depth, (void)max_bytes_in_flight;
  errno = ENOSYS;
  return NULL;
}

int fx_ring_queue(fx_ring *ring, int mode, uint32_t n, const int32_t *fds, const uint64_t *offsets,
                  const uint64_t *addresses, const uint32_t *lengths, int32_t *results, uint64_t ticket) {
  (void)ring, (void)mode, (void)n, (void)fds, (void)offsets, (void)addresses, (void)lengths, (void)results;
  (void)ticket;
  return -ENOSYS;
}

int fx_ring_submit(fx_ring *ring) { return (void)ring, -ENOSYS; }

int fx_ring_reap(fx_ring *ring) { return (void)ring, 0; }

int fx_ring_register(fx_ring *ring, uint64_t base, uint64_t size) {
  (void)ring, (void)base, (void)size;
  return -ENOSYS;
}

uint32_t fx_ring_in_flight(fx_ring *ring) { return (void)ring, 0; }

uint64_t fx_ring_queued(fx_ring *ring) { return (void)ring, 0; }

int fx_ring_close(fx_ring *ring) { return (void)ring, 0; }
#endif
