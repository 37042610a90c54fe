// The windows of a row on a CPU.
#pragma once
#include <limits>

#include "problem.h"

// sum_w max_j z[w pool + j]; what is left over of z (N) is dropped. Eight windows at a time, in a fixed
// order, and by comparisons that are no branches: of those every other one goes otherwise than foreseen.
// Such a maximum drops a NaN but the first of a window, so that they are looked for beside.
inline double sum_of_maxima(const float* z, int64_t N, int64_t pool) {
  constexpr int kTogether = 8;
  const int64_t windows = N / pool, whole = windows - windows % kTogether;
  double sum[kTogether] = {};
  bool is_nan = false;
  for (int64_t w = 0; w < whole; w += kTogether, z += kTogether * pool) {
    float top[kTogether];
    for (int u = 0; u < kTogether; ++u) top[u] = z[u * pool];
    for (int64_t j = 1; j < pool; ++j)
      for (int u = 0; u < kTogether; ++u) {
        const float v = z[u * pool + j];
        is_nan |= v != v;
        top[u] = v > top[u] ? v : top[u];
      }
    for (int u = 0; u < kTogether; ++u) sum[u] += top[u];
  }
  for (int64_t w = whole; w < windows; ++w, z += pool) {
    float top = z[0];
    for (int64_t j = 1; j < pool; ++j) top = larger(z[j], top);
    sum[w - whole] += top;
  }
  for (int count = kTogether / 2; count > 0; count /= 2)
    for (int u = 0; u < count; ++u) sum[u] = sum[2 * u] + sum[2 * u + 1];
  return is_nan ? std::numeric_limits<double>::quiet_NaN() : sum[0];
}
