// D[m,k] = W[2m,k] - W[2m+1,k] and s[k] = sum_n W[n,k] on a CPU. As the column sum (rows.h), to the bit:
// four pairs of rows together, strips of columns that follow one another at once.
// Moves: W once, 8 M K bytes; D, 4 M K. Apart, the sum and the difference read W twice.
#include "pair_difference.h"

#include <algorithm>

#include "rows.h"

namespace {

// Columns that are in L1 between the difference and the sum: 16 KB of eight rows.
constexpr int64_t kNear = 512;

template <int Rows>
void take_pairs(double* sum, float* d, const float* a, int64_t stride, int64_t count) {
  for (int64_t from = 0; from < count; from += kNear) {
    const int64_t to = std::min(from + kNear, count);
    for (int pair = 0; pair < Rows / 2; ++pair) {
      const float *upper = a + 2 * pair * stride, *lower = upper + stride;
      float* __restrict difference = d + pair * stride;
      for (int64_t k = from; k < to; ++k) difference[k] = upper[k] - lower[k];
    }
    add_together<Rows>(sum, a, stride, from, to);
  }
}

}  // namespace

void launch(const PairDifference& p, int64_t begin, int64_t end) {
  const int64_t last = std::min(end * kStrip, p.K);
  for (int64_t first = begin * kStrip; first < last; first += kWide) {
    const int64_t count = std::min(kWide, last - first);
    double* sum = p.s + first;
    std::fill(sum, sum + count, 0.0);
    by_eight(2 * p.M, [&](auto together, int64_t n) {
      take_pairs<together.value>(sum, p.D + n / 2 * p.K + first, p.W + n * p.K + first, p.K, count);
    });
  }
}
