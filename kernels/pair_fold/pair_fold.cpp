// Weights as pair_rows.h takes them; the bias by one thread: it is short beside them.
// Moves: W once, 8 M K bytes; D, 4 M K.
#include "pair_fold.h"

#include "pair_rows.h"

int64_t tasks_of(const PairFold& p) { return (p.K + kPairStrip - 1) / kPairStrip; }

void take_weights(const PairFold& p, int64_t begin, int64_t end) {
  take_pairs({p.W, p.D, p.w_sum, p.M, p.K}, begin, end);
}

void take_bias(const PairFold& p) {
  double sum = 0;
  for (int64_t m = 0; m < p.M; ++m) {
    const double even = p.bias[2 * m], odd = p.bias[2 * m + 1];
    p.shifts[m] = even - odd;
    sum += even + odd;
  }
  *p.b_sum = sum;
}
