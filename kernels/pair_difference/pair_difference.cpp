// D[m,k] = W[2m,k] - W[2m+1,k] and s[k] = sum_n W[n,k] on a CPU. As the column sum: a strip of columns
// at a time, its sums in L1, two pairs of rows together; the sums are the same to the bit.
// Moves: W once, 8 M K bytes; D, 4 M K. Apart, the sum and the difference read W twice.
#include "pair_difference.h"

#include <algorithm>

namespace {

void pair(const float* __restrict a, const float* __restrict b, float* __restrict d,
          double* __restrict sum, int64_t count) {
  for (int64_t k = 0; k < count; ++k) {
    d[k] = a[k] - b[k];
    sum[k] += a[k];
    sum[k] += b[k];
  }
}

void two_pairs(const float* __restrict a, const float* __restrict b, const float* __restrict c,
               const float* __restrict d, float* __restrict first, float* __restrict second,
               double* __restrict sum, int64_t count) {
  for (int64_t k = 0; k < count; ++k) {
    first[k] = a[k] - b[k];
    second[k] = c[k] - d[k];
    sum[k] += (double(a[k]) + double(b[k])) + (double(c[k]) + double(d[k]));
  }
}

}  // namespace

void launch(const PairDifference& p, int64_t begin, int64_t end) {
  constexpr int64_t kLine = 16, kRows = 4;  // floats of a cache line; rows together
  for (int64_t strip = begin; strip < end; ++strip) {
    double sum[kStrip] = {};
    const int64_t at = strip * kStrip, count = std::min(kStrip, p.K - at);
    int64_t m = 0;
    for (; m + 2 <= p.M; m += 2) {
      const float* W = p.W + 2 * m * p.K + at;
      float* D = p.D + m * p.K + at;
      for (int64_t k = 0; k < count; k += kLine)
        for (int64_t r = 0; r < kRows; ++r) __builtin_prefetch(W + (kRows + r) * p.K + k);
      two_pairs(W, W + p.K, W + 2 * p.K, W + 3 * p.K, D, D + p.K, sum, count);
    }
    for (; m < p.M; ++m) {
      const float* W = p.W + 2 * m * p.K + at;
      pair(W, W + p.K, p.D + m * p.K + at, sum, count);
    }
    std::copy(sum, sum + count, p.s + at);
  }
}
