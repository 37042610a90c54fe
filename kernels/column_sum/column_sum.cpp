// s[k] = sum_n W[n,k] on a CPU. A strip of columns at a time: its sums stay in L1, the rows go by
// once, four together, so that a sum is loaded and stored once for four additions. The columns are
// independent, so the compiler vectorises across them.
// Moves: W once, 4 N K bytes, also where its squares are wanted. Rows of the strip are asked for while
// those before are added.
#include "column_sum.h"

#include <algorithm>

namespace {

constexpr int64_t kLine = 16, kRows = 4;  // floats of a cache line; rows together

template <bool kSquares>
void strip(const ColumnSum& p, int64_t first, int64_t count) {
  double sum[kStrip] = {}, square[kSquares ? kStrip : 1] = {};
  const float* W = p.W + first;
  int64_t n = 0;
  for (; n + kRows <= p.N; n += kRows) {
    const float *a = W + n * p.K, *b = a + p.K, *c = b + p.K, *d = c + p.K;
    for (int64_t k = 0; k < count; k += kLine)
      for (int64_t r = 0; r < kRows; ++r) __builtin_prefetch(a + (kRows + r) * p.K + k);
    for (int64_t k = 0; k < count; ++k) {
      const double A = a[k], B = b[k], C = c[k], D = d[k];
      sum[k] += (A + B) + (C + D);
      if (kSquares) square[k] += (A * A + B * B) + (C * C + D * D);
    }
  }
  for (; n < p.N; ++n)
    for (int64_t k = 0; k < count; ++k) {
      const double A = W[n * p.K + k];
      sum[k] += A;
      if (kSquares) square[k] += A * A;
    }
  std::copy(sum, sum + count, p.s + first);
  if (kSquares) std::copy(square, square + count, p.squares + first);
}

}  // namespace

void launch(const ColumnSum& p, int64_t begin, int64_t end) {
  for (int64_t task = begin; task < end; ++task) {
    const int64_t first = task * kStrip, count = std::min(kStrip, p.K - first);
    p.squares ? strip<true>(p, first, count) : strip<false>(p, first, count);
  }
}
