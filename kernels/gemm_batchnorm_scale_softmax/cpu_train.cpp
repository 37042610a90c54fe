// Train mode on a CPU, behind a block of the product: what it says about the batch.
//   mean_i z[i,n] and var_i z[i,n], from sums of z - z[0] and of its square; then the tail as in eval
//   mode, y = exp(t - m) / s with t = a (z - mean_i z) + d
// Who owns what: a call owns strips of features, whose sums stay in L1, over the whole batch.
// Moves: z from the cache, where the product has just left it.
// In double, from the first row on: no square overflows, and of equal rows the variance is 0.
#include <algorithm>

#include "problem.h"

namespace {

constexpr int64_t kStrips = 4;  // at once: longer pieces of a row, and their sums are in L1 still

}  // namespace

void launch(const Statistics& p, int64_t begin, int64_t end) {
  for (int64_t strip = begin; strip < end; strip += kStrips) {
    const int64_t first = p.first + strip * kStrip;
    const int64_t count = std::min(std::min(kStrips, end - strip) * kStrip, p.last - first);
    const float *top = p.z + first, *z = top;
    double sum[kStrips * kStrip] = {}, square[kStrips * kStrip] = {};
    for (int64_t i = 0; i < p.B; ++i, z += p.N)
      for (int64_t k = 0; k < count; ++k) {
        const double from_first = static_cast<double>(z[k]) - top[k];
        sum[k] += from_first;
        square[k] += from_first * from_first;
      }
    for (int64_t k = 0; k < count; ++k) write_feature(p, first + k, sum[k], square[k]);
  }
}
