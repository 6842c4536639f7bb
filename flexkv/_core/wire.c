/* wire.c: see wire.h. The stream is a row of frames: a block, and the 8 bytes of its checksum. */
#include "wire.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "sum.h"

#define SUM_BYTES sizeof(uint64_t)
#define PIECE_BYTES (256u << 10) /* moved at once: fits the cache, and is worth a call */
#define MOST_PARTS 128           /* of memory, in one call */

struct fx_passage {
  uint64_t base, stride, size, total; /* total: of the stream */
  const uint32_t *slots;
  const uint64_t *keys;
  uint64_t *sums, *told;
  uint64_t moved, summed; /* of the stream: passed the socket; taken into checksums */
  void *state;            /* of the checksum of a block that is not whole yet */
  int fast;
};

fx_passage *fx_passage_open(uint64_t base, uint64_t stride, const uint32_t *slots, uint64_t size, const uint64_t *keys,
                            uint32_t n, uint64_t *sums, uint64_t *told) {
  fx_passage *passage = size ? calloc(1, sizeof *passage) : NULL;
  void *state = aligned_alloc(64, (fx_sum_state_bytes() + 63) / 64 * 64);
  if (!passage || !state) {
    free(passage);
    free(state);
    errno = size ? ENOMEM : EINVAL;
    return NULL;
  }
  *passage = (fx_passage){.base = base,
                          .stride = stride,
                          .size = size,
                          .total = n * (size + SUM_BYTES),
                          .slots = slots,
                          .keys = keys,
                          .sums = sums,
                          .told = told,
                          .state = state,
                          .fast = fx_sum_usable()};
  return passage;
}

void fx_passage_close(fx_passage *passage) {
  free(passage->state);
  free(passage);
}

uint64_t fx_passage_moved(fx_passage *passage) { return passage->moved; }

static uint8_t *place_of(const fx_passage *p, uint64_t block) {
  return (uint8_t *)(uintptr_t)(p->base + p->slots[block] * p->stride);
}

/* Take the checksums of what lies between `summed` and `until`; those of whole blocks are there afterwards. */
static void sum_until(fx_passage *p, uint64_t until) {
  const uint64_t frame = p->size + SUM_BYTES;
  while (p->summed < until) {
    uint64_t block = p->summed / frame, at = p->summed % frame, left = until - p->summed;
    if (at >= p->size) { /* within a checksum */
      p->summed += left < frame - at ? left : frame - at;
      continue;
    }
    uint64_t now = left < p->size - at ? left : p->size - at;
    if (at == 0) fx_sum_begin(p->state, fx_sum_seed(p->keys + 2 * block));
    (p->fast ? fx_sum_more_avx2 : fx_sum_more)(p->state, place_of(p, block) + at, now);
    if (at + now == p->size) p->sums[block] = fx_sum_end(p->state);
    p->summed += now;
  }
}

/* Where the stream from `from` to `until` lies, as far as `parts` reach; returns how many there are. */
static int parts_of(const fx_passage *p, uint64_t *sums, uint64_t from, uint64_t until, struct iovec *parts) {
  const uint64_t frame = p->size + SUM_BYTES;
  int count = 0;
  while (from < until && count < MOST_PARTS) {
    uint64_t block = from / frame, at = from % frame;
    uint64_t end = at < p->size ? p->size : frame, now = until - from < end - at ? until - from : end - at;
    uint8_t *place = at < p->size ? place_of(p, block) + at : (uint8_t *)(sums + block) + (at - p->size);
    parts[count++] = (struct iovec){place, now};
    from += now;
  }
  return count;
}

static int wait_for(int fd, short events, int patience_ms) {
  struct pollfd waiting = {.fd = fd, .events = events};
  int ready = patience_ms > 0 ? poll(&waiting, 1, patience_ms) : 0;
  return ready > 0 || (ready < 0 && errno == EINTR);
}

static int pass(fx_passage *p, int fd, uint64_t most, int patience_ms, int out) {
  const uint64_t stop = most < p->total - p->moved ? p->moved + most : p->total;
  while (p->moved < stop) {
    struct iovec parts[MOST_PARTS];
    uint64_t until = stop - p->moved < PIECE_BYTES ? stop : p->moved + PIECE_BYTES;
    if (out && p->summed <= p->moved) sum_until(p, until);
    if (out && p->summed < until) until = p->summed;
    struct msghdr message = {.msg_iov = parts};
    message.msg_iovlen = (size_t)parts_of(p, out ? p->sums : p->told, p->moved, until, parts);
    ssize_t now = out ? sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) : recvmsg(fd, &message, MSG_DONTWAIT);
    if (now > 0) {
      p->moved += (uint64_t)now;
      if (!out) sum_until(p, p->moved);
    } else if (now == 0) {
      return -ENODATA;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_for(fd, out ? POLLOUT : POLLIN, patience_ms)) return -EAGAIN;
    } else if (errno != EINTR) {
      return -errno;
    }
  }
  return p->moved == p->total;
}

int fx_passage_send(fx_passage *passage, int fd, uint64_t most, int patience_ms) {
  return pass(passage, fd, most, patience_ms, 1);
}

int fx_passage_receive(fx_passage *passage, int fd, uint64_t most, int patience_ms) {
  return pass(passage, fd, most, patience_ms, 0);
}
