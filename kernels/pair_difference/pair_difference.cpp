// Differences of pairs and the column sum on a CPU (pair_rows.h).
// Moves: W once, 8 M K bytes; D, 4 M K. Apart, the sum and the difference read W twice.
#include "pair_difference.h"

#include "pair_rows.h"

static_assert(kStrip == kPairStrip, "tasks are strips");

void launch(const PairDifference& p, int64_t begin, int64_t end) {
  take_pairs({p.W, p.D, p.s, p.M, p.K}, begin, end);
}
