// s[k] = sum_n W[n,k] on a CPU. A strip of columns at a time: its sums stay in L1, the rows go by
// once, four together, so that a sum is loaded and stored once for four additions. The columns are
// independent, so the compiler vectorises across them.
// Moves: W once, 4 N K bytes. Rows of the strip are asked for while those before are added.
#include "column_sum.h"

#include <algorithm>

void launch(const ColumnSum& p, int64_t begin, int64_t end) {
  constexpr int64_t kLine = 16, kRows = 4;  // floats of a cache line; rows together
  for (int64_t strip = begin; strip < end; ++strip) {
    double sum[kStrip] = {};
    const int64_t first = strip * kStrip, count = std::min(kStrip, p.K - first);
    const float* W = p.W + first;
    int64_t n = 0;
    for (; n + kRows <= p.N; n += kRows) {
      const float *a = W + n * p.K, *b = a + p.K, *c = b + p.K, *d = c + p.K;
      for (int64_t k = 0; k < count; k += kLine)
        for (int64_t r = 0; r < kRows; ++r) __builtin_prefetch(a + (kRows + r) * p.K + k);
      for (int64_t k = 0; k < count; ++k)
        sum[k] += (double(a[k]) + double(b[k])) + (double(c[k]) + double(d[k]));
    }
    for (; n < p.N; ++n)
      for (int64_t k = 0; k < count; ++k) sum[k] += W[n * p.K + k];
    std::copy(sum, sum + count, p.s + first);
  }
}
