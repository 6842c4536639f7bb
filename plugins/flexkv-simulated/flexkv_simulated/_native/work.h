/* work.h: one piece of work, as the streams of device.c queue it. */
#ifndef SIM_WORK_H
#define SIM_WORK_H
#include "sim.h"

enum { SIM_HOST = SIM_KINDS, SIM_WAIT }; /* kinds of work that need no engine */

typedef struct work {
  struct work *next;
  sim_batch batch; /* its arrays lie behind this structure */
  uint32_t kind, stream;
  uint64_t number, size_bytes, duration_ns;
  uint64_t submitted_ns, finish_ns, call_ns;
  void *ticket;
  void (*function)(void *); /* SIM_HOST: called with `ticket` */
  uint32_t other;           /* SIM_WAIT: until this stream has done `other_number` */
  uint64_t other_number;
  uint32_t blocks; /* how many of the batch are moved: all, unless a fault says less */
  int error, silent;
} work;

work *sim_make_work(uint32_t kind, const sim_batch *batch, uint32_t plane_bytes); /* NULL: no memory */
void sim_do_work(const sim_calls *calls, const work *item); /* move the bytes, now, in this thread */
#endif
