// w[m,k] = 1/pool sum_j W[m pool + j, k] on a CPU (rows.h). A task is a strip of columns of one group;
// strips of a group that follow one another are taken together, so that memory is read in long rows.
// The last rows of a group go from registers to w.
// Moves: W once, 4 N K bytes; w and w_exact, 12 K N / pool.
#include "group_mean.h"

#include <algorithm>

#include "fresh_pages.h"
#include "rows.h"

void launch(const GroupMean& p, int64_t begin, int64_t end) {
  const int64_t strips = (p.K + kStrip - 1) / kStrip;
  const int64_t from = begin / strips, groups = (end + strips - 1) / strips - from;
  FreshPages w_pages(p.w + from * p.K, groups * p.K * sizeof(float));
  FreshPages exact_pages(p.w_exact ? p.w_exact + from * p.K : nullptr, groups * p.K * sizeof(double));
  const double pool = static_cast<double>(p.pool);
  double sum[kWide];
  for (int64_t task = begin; task < end;) {
    const int64_t m = task / strips, strip = task % strips;
    const int64_t together = std::min({strips - strip, end - task, kWide / kStrip});
    const int64_t first = strip * kStrip, count = std::min(together * kStrip, p.K - first);
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
