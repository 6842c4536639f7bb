#include "rates.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FX_BINS 48u
#define FX_FIRST_BIN 0.25 /* seconds */
#define FX_CLASSES 2048u
#define FX_CELLS 8192u /* of the table of classes */
#define FX_ROUND 100u  /* prompts from one estimate of a class to the next */
#define FX_DECAY 0.97  /* of all counts, once a round */
#define FX_SMOOTH 0.7  /* of a bin's hazard is expected in the next one */
#define FX_POOL 30.0   /* runs that a prior weighs: for the root, a class's scale, a class's bin */
#define FX_SCALE 10.0
#define FX_SHAPE 100.0

typedef struct {
  uint32_t parent, code, depth;
  double events[FX_BINS], exposure[FX_BINS]; /* so far */
  double reused[FX_BINS], entered[FX_BINS];  /* as the round began, with those of all classes below */
  double hazard[FX_BINS], value[FX_BINS];
} fx_class;

struct fx_rates {
  fx_class *classes;
  uint32_t count, room, due; /* due: the next to be estimated */
  uint32_t counted;          /* classes there were as the round began */
  uint32_t steps, rounds;
  double length; /* mean weight of a run */
  double start[FX_BINS + 1];
  uint32_t table[FX_CELLS]; /* 0: vacant, the root is not in it */
};

fx_rates *fx_rates_open(void) {
  fx_rates *rates = calloc(1, sizeof *rates);
  if (!rates) return NULL;
  rates->room = 64;
  rates->classes = calloc(rates->room, sizeof *rates->classes);
  if (!rates->classes) {
    free(rates);
    return NULL;
  }
  rates->count = 1;
  rates->length = 1.0;
  for (uint32_t bin = 1; bin <= FX_BINS; bin++) rates->start[bin] = FX_FIRST_BIN * exp2((bin - 1) / 2.0);
  for (uint32_t bin = 0; bin < FX_BINS; bin++) rates->classes[0].value[bin] = 1.0 / (1.0 + 4.0 * rates->start[bin]);
  return rates;
}

void fx_rates_close(fx_rates *rates) {
  if (rates) free(rates->classes);
  free(rates);
}

uint32_t fx_rates_bin(double age) {
  if (age < FX_FIRST_BIN) return 0;
  int octaves;
  double part = frexp(age / FX_FIRST_BIN, &octaves); /* half up to 1 */
  int halves = 2 * (octaves - 1) + (part >= 0.70710678118654752440);
  return halves >= (int)FX_BINS - 2 ? FX_BINS - 1 : 1 + (uint32_t)halves;
}

double fx_rates_start(const fx_rates *rates, uint32_t bin) { return bin < FX_BINS ? rates->start[bin] : HUGE_VAL; }

uint32_t fx_rates_class(fx_rates *rates, uint32_t parent, uint32_t code) {
  uint32_t at = (parent * 2654435761u + code * 40503u) % FX_CELLS;
  for (; rates->table[at]; at = (at + 1) % FX_CELLS) {
    const fx_class *found = &rates->classes[rates->table[at]];
    if (found->parent == parent && found->code == code) return rates->table[at];
  }
  if (rates->count == rates->room) {
    fx_class *more = NULL;
    if (rates->room < FX_CLASSES) more = realloc(rates->classes, 2 * rates->room * sizeof *more);
    if (!more) return parent;
    rates->classes = more;
    rates->room *= 2;
  }
  fx_class *from = &rates->classes[parent], *made = &rates->classes[rates->count];
  memset(made, 0, sizeof *made);
  made->parent = parent;
  made->code = code;
  made->depth = from->depth + 1;
  memcpy(made->hazard, from->hazard, sizeof made->hazard);
  memcpy(made->value, from->value, sizeof made->value);
  return rates->table[at] = rates->count++;
}

void fx_rates_entered(fx_rates *rates, uint32_t number, uint32_t from, uint32_t to, uint32_t blocks) {
  double weight = sqrt(blocks);
  for (uint32_t bin = from; bin <= to; bin++) rates->classes[number].exposure[bin] += weight;
}

void fx_rates_reused(fx_rates *rates, uint32_t number, uint32_t bin, uint32_t blocks) {
  rates->classes[number].events[bin] += sqrt(blocks);
}

void fx_rates_began(fx_rates *rates, uint32_t blocks) { rates->length += 0.001 * (sqrt(blocks) - rates->length); }

/* The best ratio of expected reuses to expected block-seconds over all holding times, for every age. From the oldest
 * bin down, stretches of bins are joined to the one before them while that raises its ratio. */
static void value(const fx_rates *rates, fx_class *of) {
  struct {
    double gain, cost, survival;
  } stretch[FX_BINS];
  uint32_t top = 0;
  for (uint32_t bin = FX_BINS; bin-- > 0;) {
    double hazard = of->hazard[bin], width = rates->start[bin + 1] - rates->start[bin];
    double gain = hazard, cost = (1.0 - hazard / 2.0) * width, survival = 1.0 - hazard;
    for (; top && stretch[top - 1].gain * cost > gain * stretch[top - 1].cost; top--) {
      gain += survival * stretch[top - 1].gain;
      cost += survival * stretch[top - 1].cost;
      survival *= stretch[top - 1].survival;
    }
    stretch[top].gain = gain;
    stretch[top].cost = cost;
    stretch[top++].survival = survival;
    of->value[bin] = gain / cost;
  }
}

static void estimate_root(fx_rates *rates) {
  fx_class *root = &rates->classes[0];
  double hazard = 0.05, weight = FX_POOL * rates->length;
  for (uint32_t bin = 0; bin < FX_BINS; bin++) {
    double reused = root->reused[bin], entered = fmax(root->entered[bin], reused);
    hazard = fmin(0.9, (reused + weight * FX_SMOOTH * hazard) / (entered + weight));
    root->hazard[bin] = hazard;
  }
  value(rates, root);
}

static void estimate(fx_rates *rates, fx_class *of) {
  const fx_class *parent = &rates->classes[of->parent];
  double events = 0.0, expected = 0.0, limit = of->depth == 1 ? 0.9 : 0.95;
  for (uint32_t bin = 0; bin < FX_BINS; bin++) {
    events += of->reused[bin];
    expected += of->entered[bin] * parent->hazard[bin];
  }
  double weight = FX_SCALE * rates->length, scale = (events + weight) / (expected + weight);
  weight = FX_SHAPE * rates->length;
  for (uint32_t bin = 0; bin < FX_BINS; bin++) {
    double reused = of->reused[bin], entered = fmax(of->entered[bin], reused);
    of->hazard[bin] = fmin(limit, (reused + weight * fmin(0.9, scale * parent->hazard[bin])) / (entered + weight));
  }
  value(rates, of);
}

/* Take the counts of all classes, sum them up towards the root, and let the old ones fade. */
static void begin_round(fx_rates *rates) {
  for (uint32_t i = 0; i < rates->count; i++) {
    fx_class *one = &rates->classes[i];
    memcpy(one->reused, one->events, sizeof one->reused);
    memcpy(one->entered, one->exposure, sizeof one->entered);
    for (uint32_t bin = 0; bin < FX_BINS; bin++) {
      one->events[bin] *= FX_DECAY;
      one->exposure[bin] *= FX_DECAY;
    }
  }
  for (uint32_t i = rates->count; i-- > 1;) {
    const fx_class *one = &rates->classes[i];
    fx_class *parent = &rates->classes[one->parent];
    for (uint32_t bin = 0; bin < FX_BINS; bin++) {
      parent->reused[bin] += one->reused[bin];
      parent->entered[bin] += one->entered[bin];
    }
  }
  estimate_root(rates);
  rates->counted = rates->count;
  rates->due = 1;
  rates->rounds++;
}

void fx_rates_step(fx_rates *rates) {
  if (++rates->steps % FX_ROUND == 0) begin_round(rates);
  uint32_t some = rates->counted / (FX_ROUND / 4) + 1;
  for (; some && rates->due < rates->counted; some--) estimate(rates, &rates->classes[rates->due++]);
}

int fx_rates_learned(const fx_rates *rates) {
  return rates->rounds > 1 || (rates->rounds && rates->due >= rates->counted);
}

uint32_t fx_rates_limit(void) { return FX_CLASSES; }

uint32_t fx_rates_count(const fx_rates *rates) { return rates->count; }

uint32_t fx_rates_parent(const fx_rates *rates, uint32_t number) { return rates->classes[number].parent; }

uint32_t fx_rates_code(const fx_rates *rates, uint32_t number) { return rates->classes[number].code; }

double fx_rates_value(const fx_rates *rates, uint32_t number, uint32_t bin) {
  return rates->classes[number].value[bin];
}

double fx_rates_hazard(const fx_rates *rates, uint32_t number, uint32_t bin) {
  return rates->classes[number].hazard[bin];
}
