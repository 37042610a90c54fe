// D[m,k] = W[2m,k] - W[2m+1,k] and s[k] = sum_n W[n,k] on a CPU. As the column sum (rows.h), to the bit:
// four pairs of rows together, strips of columns that follow one another at once.
#pragma once
#include <algorithm>
#include <cstdint>

#include "fresh_pages.h"
#include "rows.h"

constexpr int64_t kPairStrip = 1024;  // columns of one task: 4 KB of each row, 8 KB of sums

// Bytes of D from which it goes past the caches: a store there reads a line before it writes it, which
// takes longer than a product gains that finds D in a cache (8 MB on two cores of a Zen 4).
constexpr int64_t kFar = int64_t{4} << 20;

// D and s of the rows from `a` on, kFloats columns at a time: twelve rows that are 2^n apart do not
// stay in L1 between the difference and the sum.
template <int Rows, bool Streamed>
void take_pairs(double* sum, float* d, const float* a, int64_t stride, int64_t count) {
  const auto sum_from = [&](int64_t from, int64_t columns) {
    total_together<Rows>(a + from, stride, columns,
                         [&](int64_t k, auto total) { add(sum + from + k, total); });
  };
  const int64_t whole = count - count % kFloats;
  for (int64_t k = 0; k < whole; k += kFloats) {
    for (int pair = 0; pair < Rows / 2; ++pair) {
      const float *upper = a + 2 * pair * stride + k, *lower = upper + stride;
      float* to = d + pair * stride + k;
      const floats difference = load(upper) - load(lower);
      Streamed ? stream(to, difference) : store(to, difference);
    }
    sum_from(k, kFloats);
  }
  for (int pair = 0; pair < Rows / 2; ++pair) {
    const float *upper = a + 2 * pair * stride, *lower = upper + stride;
    for (int64_t k = whole; k < count; ++k) d[pair * stride + k] = upper[k] - lower[k];
  }
  sum_from(whole, count % kFloats);
}

// W (2 M, K) contiguous; D (M, K), s (K) of its pairs.
struct Pairs {
  const float* W;
  float* D;
  double* s;
  int64_t M, K;
};

template <bool Streamed>
void take_strips(const Pairs& p, int64_t begin, int64_t end) {
  const int64_t all = (p.K + kPairStrip - 1) / kPairStrip;
  FreshPages pages(p.D, p.M * p.K * sizeof(float), begin, end, all);
  const int64_t last = std::min(end * kPairStrip, p.K);
  for (int64_t first = begin * kPairStrip; first < last; first += kWide) {
    const int64_t count = std::min(kWide, last - first);
    double* sum = p.s + first;
    std::fill(sum, sum + count, 0.0);
    by_eight(2 * p.M, [&](auto rows, int64_t n) {
      float* d = p.D + n / 2 * p.K + first;
      pages.reach((n + rows.value) / 2 * p.K * sizeof(float));
      take_pairs<rows.value, Streamed>(sum, d, p.W + n * p.K + first, p.K, count);
    });
  }
  if (Streamed) streamed();
}

// Strips of columns begin <= i < end.
inline void take_pairs(const Pairs& p, int64_t begin, int64_t end) {
  if (begin == end) return;
  const bool far = p.M * p.K * static_cast<int64_t>(sizeof(float)) >= kFar;
  const bool aligned = p.K % kFloats == 0 && reinterpret_cast<uintptr_t>(p.D) % kVectorBytes == 0;
  far && aligned ? take_strips<true>(p, begin, end) : take_strips<false>(p, begin, end);
}
