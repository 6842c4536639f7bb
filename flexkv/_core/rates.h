/* rates: how soon blocks of a class are used again, learned from what happened to earlier ones.
 *
 * Ages are cut into bins. A class knows how many blocks were used again in a bin (events) and how many entered it
 * (exposure), those not used again yet included. Classes form a tree: a class is judged by its parent's hazard as long
 * as it has seen little itself. `fx_rates_value` is the best reuse rate (per second) that any holding time offers to a
 * block of that class and age: a Gittins index, as in LHD (Beckmann, Chen, Cidon, NSDI 2018). */
#ifndef FX_RATES_H
#define FX_RATES_H
#include <stdint.h>

typedef struct fx_rates fx_rates;

fx_rates *fx_rates_open(void); /* NULL when there is no memory */
void fx_rates_close(fx_rates *rates);

/* The bin of an age in seconds: 0 below a quarter of one, then half octaves. */
uint32_t fx_rates_bin(double age);

double fx_rates_start(const fx_rates *rates, uint32_t bin); /* the age at which it begins; infinite for none */

/* The class with this code below `parent` (0: the root), made if it is new; `parent` when there are too many. */
uint32_t fx_rates_class(fx_rates *rates, uint32_t parent, uint32_t code);

/* `blocks` of a class entered the bins from..to; they were used again in a bin; a run of `blocks` began. They weigh as
 * much as their square root: they share one fate. */
void fx_rates_entered(fx_rates *rates, uint32_t number, uint32_t from, uint32_t to, uint32_t blocks);
void fx_rates_reused(fx_rates *rates, uint32_t number, uint32_t bin, uint32_t blocks);
void fx_rates_began(fx_rates *rates, uint32_t blocks);

/* Once per prompt: estimate some classes anew, so that each has its turn in every round of a hundred. */
void fx_rates_step(fx_rates *rates);

int fx_rates_learned(const fx_rates *rates); /* whether every class was estimated once */
uint32_t fx_rates_limit(void); /* numbers of classes are below it */
uint32_t fx_rates_count(const fx_rates *rates);
uint32_t fx_rates_parent(const fx_rates *rates, uint32_t number);
uint32_t fx_rates_code(const fx_rates *rates, uint32_t number);
double fx_rates_value(const fx_rates *rates, uint32_t number, uint32_t bin);
double fx_rates_hazard(const fx_rates *rates, uint32_t number, uint32_t bin);
#endif
