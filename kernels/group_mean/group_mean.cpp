// w[m,k] = 1/pool sum_j W[m pool + j, k] on a CPU. A task is a strip of columns of one group: its
// sums stay in L1, the rows of the group go by once, four together, so that a sum is loaded and
// stored once for four additions. Columns are independent, so the compiler vectorises across them.
// Moves: W once, 4 N K bytes; w and w_exact, 12 K N / pool. The next rows of the strip are asked for early.
#include "group_mean.h"

#include <algorithm>

void launch(const GroupMean& p, int64_t begin, int64_t end) {
  constexpr int64_t kLine = 16, kRows = 4;  // floats of a cache line; rows together
  const int64_t strips = (p.K + kStrip - 1) / kStrip;
  for (int64_t task = begin; task < end; ++task) {
    double sum[kStrip] = {};
    const int64_t m = task / strips, first = task % strips * kStrip;
    const int64_t count = std::min(kStrip, p.K - first);
    const float* W = p.W + m * p.pool * p.K + first;
    int64_t j = 0;
    for (; j + kRows <= p.pool; j += kRows) {
      const float *a = W + j * p.K, *b = a + p.K, *c = b + p.K, *d = c + p.K;
      for (int64_t k = 0; k < count; k += kLine)
        for (int64_t r = 0; r < kRows; ++r) __builtin_prefetch(a + (kRows + r) * p.K + k);
      for (int64_t k = 0; k < count; ++k)
        sum[k] += (double(a[k]) + double(b[k])) + (double(c[k]) + double(d[k]));
    }
    for (; j < p.pool; ++j)
      for (int64_t k = 0; k < count; ++k) sum[k] += W[j * p.K + k];
    const double pool = static_cast<double>(p.pool);
    for (int64_t k = 0; k < count; ++k) sum[k] /= pool;
    std::copy(sum, sum + count, p.w + m * p.K + first);
    if (p.w_exact) std::copy(sum, sum + count, p.w_exact + m * p.K + first);
  }
}
