// Weights as mean_rows.h takes them; the bias by one thread: it is short beside them.
// Moves: W once, 4 N K bytes; w and w_exact, 12 K N / pool.
#include "mean_fold.h"

#include "mean_rows.h"

namespace {

Means weights_of(const MeanFold& p) { return {p.W, p.w, p.w_exact, p.K, p.groups, p.pool}; }

}  // namespace

int64_t tasks_of(const MeanFold& p) { return tasks_of(weights_of(p)); }

int64_t grain_of(const MeanFold& p) { return grain_of(weights_of(p)); }

void take_weights(const MeanFold& p, int64_t begin, int64_t end) {
  take_means(weights_of(p), begin, end);
}

void take_bias(const MeanFold& p) {
  const Means of{p.bias, p.b, p.b_exact, 1, p.groups, p.pool};
  take_means(of, 0, tasks_of(of));
}
