// w[m,k] = 1/pool sum_j W[m pool + j, k] on a CPU (rows.h). A task is a strip of columns of one group;
// strips of a group that follow one another are taken together, so that memory is read in long rows.
// The last rows of a group go from registers to w.
#pragma once
#include <algorithm>
#include <cstdint>

#include "fresh_pages.h"
#include "rows.h"

constexpr int64_t kMeanStrip = 1024;  // columns of one task: 4 KB of each row, 8 KB of sums

// W (groups pool, K) contiguous; w, w_exact (groups, K), w_exact may be null.
struct Means {
  const float* W;
  float* w;
  double* w_exact;
  int64_t K, groups, pool;
};

inline int64_t tasks_of(const Means& p) { return p.groups * ((p.K + kMeanStrip - 1) / kMeanStrip); }

// Tasks below which a second thread costs more than it gives.
inline int64_t grain_of(const Means& p) {
  constexpr int64_t kLeast = 32768;  // elements of W
  const int64_t of_a_task = p.pool * std::min(p.K, kMeanStrip);
  return of_a_task < kLeast ? kLeast / of_a_task : 1;
}

inline void take_means(const Means& p, int64_t begin, int64_t end) {
  const int64_t strips = (p.K + kMeanStrip - 1) / kMeanStrip;
  const int64_t from = begin / strips, groups = (end + strips - 1) / strips - from;
  FreshPages w_pages(p.w + from * p.K, groups * p.K * sizeof(float));
  FreshPages exact_pages(p.w_exact ? p.w_exact + from * p.K : nullptr, groups * p.K * sizeof(double));
  const double pool = static_cast<double>(p.pool);
  double sum[kWide];
  for (int64_t task = begin; task < end;) {
    const int64_t m = task / strips, strip = task % strips;
    const int64_t together = std::min({strips - strip, end - task, kWide / kMeanStrip});
    const int64_t first = strip * kMeanStrip, count = std::min(together * kMeanStrip, p.K - first);
    const float* W = p.W + m * p.pool * p.K + first;
    float* w = p.w + m * p.K + first;
    double* w_exact = p.w_exact ? p.w_exact + m * p.K + first : nullptr;
    w_pages.reach((m + 1 - from) * p.K * sizeof(float));
    if (p.w_exact) exact_pages.reach((m + 1 - from) * p.K * sizeof(double));
    by_eight(p.pool, [&](auto rows, int64_t j) {
      const bool is_first = j == 0, is_last = j + rows.value == p.pool;
      total_together<rows.value>(W + j * p.K, p.K, count, [&](int64_t k, auto total) {
        auto mean = (is_first ? decltype(total){} : read(sum + k, total)) + total;
        if (!is_last) return write(sum + k, mean);
        mean /= pool;
        write(w + k, mean);
        if (w_exact) write(w_exact + k, mean);
      });
    });
    task += together;
  }
}
