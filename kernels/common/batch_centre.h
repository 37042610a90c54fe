// What a product takes from a batch x before it, on a CPU, by strips of columns:
//     mean[k] = mean_i x[i,k],  c[k] = median_g mean_{i of group g} x[i,k]
// Sums by groups of rows, in double (rows.h); a strip is read once.
#pragma once
#include <algorithm>

#include "rows.h"

constexpr int kGroups = 5;  // parts of the batch, at most, of whose means the lower median is taken

// c <- the lower median of the groups' means, each rounded: exchanges that put the larger half behind it.
// A NaN may be lost: it is in the differences.
template <int64_t Width>
inline void lower_median(const double (*sum)[Width], int groups, double rows, int64_t count,
                         float* c) {
  const int middle = (groups - 1) / 2;
  for (int64_t k = 0; k < count; ++k) {
    float v[kGroups];
    for (int g = 0; g < kGroups; ++g)
      v[g] = static_cast<float>(sum[std::min(g, groups - 1)][k] / rows);
    for (int last = groups - 1; last >= std::max(middle, 1); --last)
      for (int g = 0; g < last; ++g) {
        const float low = std::min(v[g], v[g + 1]);
        v[g + 1] = std::max(v[g], v[g + 1]);
        v[g] = low;
      }
    c[k] = v[middle];
  }
}

// The rows that come next, on their way to the cache: a row's piece is too short for a prefetcher.
template <int Rows>
inline void ask_for(const float* x, int64_t stride, int64_t count) {
  for (int r = 0; r < Rows; ++r)
    for (int64_t k = 0; k < count; k += 16) __builtin_prefetch(x + r * stride + k);
}

// c and mean of `count` columns, Width or fewer, of x (B, ...), rows `stride` apart.
template <int64_t Width>
inline void centre_of(const float* x, int64_t stride, int64_t B, int64_t count, float* c,
                      double* mean) {
  const int groups = static_cast<int>(std::min<int64_t>(kGroups, B));
  const int64_t each = B / groups;
  double sum[kGroups + 1][Width] = {};  // of the groups, then of the rows that are left over
  for (int g = 0; g <= groups; ++g) {
    const float* from = x + g * each * stride;
    by_eight(g < groups ? each : B - groups * each, [&](auto rows, int64_t i) {
      if (g < groups && i + 2 * rows.value <= each)
        ask_for<rows.value>(from + (i + rows.value) * stride, stride, count);
      total_together<rows.value>(from + i * stride, stride, count,
                                 [&](int64_t k, auto total) { add(sum[g] + k, total); });
    });
  }
  lower_median(sum, groups, static_cast<double>(each), count, c);
  for (int64_t k = 0; k < count; ++k) {
    mean[k] = 0;
    for (int g = 0; g <= groups; ++g) mean[k] += sum[g][k];
    mean[k] /= static_cast<double>(B);
  }
}

// half <- (x - c) / 2 of `count` columns of a row: of two finite numbers it is finite.
inline void halve(const float* x, const float* c, int64_t count, float* half) {
  for (int64_t k = 0; k < count; ++k) half[k] = 0.5f * x[k] - 0.5f * c[k];
}
