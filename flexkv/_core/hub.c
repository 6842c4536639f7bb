/* hub.c: see hub.h.
 *
 * Why it is safe to call fx_complete at any time, from any thread:
 * - A ticket never points to memory. It names an entry of a static table, which is NULL once its hub is closed, and
 *   `users` of the entry holds back the close while a completion is inside.
 * - One 64-bit word per slot holds generation, parts left and parts failed, so "is it still this ticket?" and "count
 *   one part down" are one compare-and-swap. Generations go on from hub to hub of the same table entry.
 * - Only the completion that counted the last part down pushes the slot to the stack, and only the loop takes from it
 *   (everything at once), so the stack has no ABA problem. */
#include "hub.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define MAX_HUBS 256u /* entry 0 stays empty, so no ticket number is 0 */
#define GENERATION_BITS 36
#define GENERATION_MASK ((UINT64_C(1) << GENERATION_BITS) - 1)
#define MAX_SLOTS (1u << 20)
#define PART_BITS 14
#define PART_MASK ((1u << PART_BITS) - 1)
#define NONE UINT32_MAX

typedef struct {
  _Atomic uint64_t state; /* generation << 28 | parts left << 14 | parts failed */
  _Atomic uint64_t error; /* generation << 28 | errno of the first failure */
  uint32_t next;          /* in the free list, the stack or the ready list */
} slot;

struct fx_hub {
  slot *slots;
  uint32_t tickets, id;
  int fd;
  uint64_t generation;                /* of the ticket taken last */
  uint32_t free, ready;               /* heads of lists, NONE when empty */
  _Atomic uint32_t in_flight;         /* written by the loop's thread only */
  _Alignas(64) _Atomic uint32_t head; /* stack of finished slots */
  _Atomic uint64_t stale;
};

static struct {
  _Alignas(64) _Atomic(fx_hub *) hub;
  _Atomic uint32_t users; /* completions that look at `hub` now */
  uint64_t generation;    /* where the next hub of this entry goes on */
} table[MAX_HUBS];
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t number_of(const fx_hub *hub, uint32_t index, uint64_t generation) {
  return (uint64_t)hub->id << 56 | (uint64_t)index << GENERATION_BITS | generation;
}

static uint64_t pack(uint64_t generation, uint32_t left, uint32_t failed) {
  return generation << (2 * PART_BITS) | (uint64_t)left << PART_BITS | failed;
}

/* Enter the hub in the first entry that is free; the search starts at a new place each time, so that entries and
 * their generations are used evenly. */
static int enter_table(fx_hub *hub) {
  static uint32_t last = 0;
  int error = EMFILE;
  pthread_mutex_lock(&table_lock);
  for (uint32_t tries = 1; tries < MAX_HUBS && error; tries++) {
    last = last % (MAX_HUBS - 1) + 1;
    if (atomic_load(&table[last].hub)) continue;
    hub->id = last;
    hub->generation = table[last].generation;
    atomic_store(&table[last].hub, hub);
    error = 0;
  }
  pthread_mutex_unlock(&table_lock);
  return error;
}

/* Take the hub out; on return no completion is inside it and none will enter. */
static void leave_table(fx_hub *hub) {
  pthread_mutex_lock(&table_lock);
  atomic_store(&table[hub->id].hub, NULL);
  while (atomic_load(&table[hub->id].users)) sched_yield();
  table[hub->id].generation = hub->generation;
  pthread_mutex_unlock(&table_lock);
}

static void release(fx_hub *hub) {
  if (hub->fd >= 0) close(hub->fd);
  free(hub->slots);
  free(hub);
}

fx_hub *fx_hub_open(uint32_t tickets) {
  if (tickets == 0 || tickets > MAX_SLOTS) {
    errno = EINVAL;
    return NULL;
  }
  fx_hub *hub = aligned_alloc(64, sizeof *hub);
  if (!hub) return NULL;
  *hub = (fx_hub){.tickets = tickets, .ready = NONE, .fd = -1};
  atomic_init(&hub->head, NONE);
  hub->slots = calloc(tickets, sizeof *hub->slots);
  hub->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  int error = !hub->slots ? ENOMEM : hub->fd < 0 ? errno : enter_table(hub);
  if (error) {
    release(hub);
    errno = error;
    return NULL;
  }
  for (uint32_t i = 0; i < tickets; i++) hub->slots[i].next = i + 1 < tickets ? i + 1 : NONE;
  return hub;
}

int fx_hub_fd(fx_hub *hub) { return hub->fd; }

uint32_t fx_hub_max_parts(void) { return PART_MASK; }

uint32_t fx_hub_in_flight(fx_hub *hub) { return atomic_load(&hub->in_flight); }

uint64_t fx_hub_stale(fx_hub *hub) { return atomic_load(&hub->stale); }

uint64_t fx_ticket_take(fx_hub *hub, uint32_t parts) {
  uint32_t index = hub->free;
  if (index == NONE || parts == 0 || parts > PART_MASK) return 0;
  slot *s = &hub->slots[index];
  hub->free = s->next;
  hub->generation = (hub->generation + 1) & GENERATION_MASK;
  atomic_store(&s->error, pack(hub->generation, 0, 0));
  atomic_store(&s->state, pack(hub->generation, parts, 0));
  atomic_fetch_add(&hub->in_flight, 1);
  return number_of(hub, index, hub->generation);
}

static void push(fx_hub *hub, uint32_t index, int wake) {
  uint32_t head = atomic_load(&hub->head);
  do {
    hub->slots[index].next = head;
  } while (!atomic_compare_exchange_weak(&hub->head, &head, index));
  if (head != NONE || !wake) return; /* whoever found the stack empty has told the loop */
  const uint64_t one = 1;
  while (write(hub->fd, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

/* Count one part down, if the slot still holds this ticket. */
static void settle_part(fx_hub *hub, uint64_t ticket, int error, int wake) {
  uint32_t index = (uint32_t)(ticket >> GENERATION_BITS) & (MAX_SLOTS - 1);
  uint64_t generation = ticket & GENERATION_MASK, state, after;
  if (index >= hub->tickets) {
    atomic_fetch_add(&hub->stale, 1);
    return;
  }
  slot *s = &hub->slots[index];
  if (error) { /* only the first one fits: the word must still be "this generation, no error" */
    uint64_t none = pack(generation, 0, 0);
    atomic_compare_exchange_strong(&s->error, &none, none | (uint32_t)(error & 0xFFFF));
  }
  state = atomic_load(&s->state);
  do {
    uint32_t left = (uint32_t)(state >> PART_BITS) & PART_MASK;
    if (state >> (2 * PART_BITS) != generation || left == 0) {
      atomic_fetch_add(&hub->stale, 1);
      return;
    }
    after = state - (UINT64_C(1) << PART_BITS) + (error != 0);
  } while (!atomic_compare_exchange_weak(&s->state, &state, after));
  if (((after >> PART_BITS) & PART_MASK) == 0) push(hub, index, wake);
}

void fx_settle(uint64_t ticket, int error, int wake) {
  int saved = errno; /* the caller may be anyone's thread */
  uint32_t id = (uint32_t)(ticket >> 56);
  atomic_fetch_add(&table[id].users, 1);
  fx_hub *hub = atomic_load(&table[id].hub);
  if (hub) settle_part(hub, ticket, error, wake);
  atomic_fetch_sub(&table[id].users, 1);
  errno = saved;
}

void fx_complete(void *ticket) { fx_settle((uint64_t)(uintptr_t)ticket, 0, 1); }

void fx_fail(void *ticket, int error) { fx_settle((uint64_t)(uintptr_t)ticket, error ? error : EIO, 1); }

void fx_refuse(void *ticket) { fx_fail(ticket, EIO); }

/* Take the whole stack; turn it round, so that what finished first is told first. */
static uint32_t take_finished(fx_hub *hub) {
  uint32_t list = atomic_exchange(&hub->head, NONE), turned = NONE;
  while (list != NONE) {
    uint32_t next = hub->slots[list].next;
    hub->slots[list].next = turned;
    turned = list;
    list = next;
  }
  return turned;
}

uint32_t fx_hub_drain(fx_hub *hub, fx_done *done, uint32_t capacity) {
  uint32_t count = 0;
  if (hub->ready == NONE) hub->ready = take_finished(hub); /* else: what the last, full drain left over */
  while (hub->ready != NONE && count < capacity) {
    uint32_t index = hub->ready;
    slot *s = &hub->slots[index];
    uint64_t state = atomic_load(&s->state);
    int32_t failed = (int32_t)(state & PART_MASK);
    done[count++] = (fx_done){.ticket = number_of(hub, index, state >> (2 * PART_BITS)),
                              .failed = failed,
                              .error = failed ? (int32_t)(atomic_load(&s->error) & 0xFFFF) : 0};
    hub->ready = s->next;
    s->next = hub->free;
    hub->free = index;
  }
  atomic_fetch_sub(&hub->in_flight, count);
  return count;
}

static int64_t now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int fx_hub_close(fx_hub *hub, uint32_t timeout_ms) {
  int64_t deadline = now_ms() + timeout_ms;
  fx_done ignored[64];
  for (;;) {
    uint64_t count;
    (void)!read(hub->fd, &count, sizeof count); /* before the drain: a push after it signals again */
    while (fx_hub_drain(hub, ignored, 64)) {
    }
    int64_t left = deadline - now_ms();
    if (fx_hub_in_flight(hub) == 0 || left <= 0) break;
    struct pollfd waiting = {.fd = hub->fd, .events = POLLIN};
    (void)poll(&waiting, 1, left > 1000 ? 1000 : (int)left);
  }
  int stayed_out = (int)fx_hub_in_flight(hub);
  leave_table(hub);
  release(hub);
  return stayed_out;
}
