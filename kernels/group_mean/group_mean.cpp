// w[m,k] = 1/pool sum_j W[m pool + j, k] on a CPU (rows.h). A task is a strip of columns of one group;
// strips of a group that follow one another are taken together, so that memory is read in long rows.
// Moves: W once, 4 N K bytes; w and w_exact, 12 K N / pool.
#include "group_mean.h"

#include <algorithm>

#include "rows.h"

void launch(const GroupMean& p, int64_t begin, int64_t end) {
  const int64_t strips = (p.K + kStrip - 1) / kStrip;
  double sum[kWide];
  for (int64_t task = begin; task < end;) {
    const int64_t m = task / strips, strip = task % strips;
    const int64_t together = std::min({strips - strip, end - task, kWide / kStrip});
    const int64_t first = strip * kStrip, count = std::min(together * kStrip, p.K - first);
    std::fill(sum, sum + count, 0.0);
    const float* W = p.W + m * p.pool * p.K + first;
    by_eight(p.pool, [&](auto together, int64_t j) {
      add_together<together.value>(sum, W + j * p.K, p.K, 0, count);
    });
    const double pool = static_cast<double>(p.pool);
    for (int64_t k = 0; k < count; ++k) sum[k] /= pool;
    std::copy(sum, sum + count, p.w + m * p.K + first);
    if (p.w_exact) std::copy(sum, sum + count, p.w_exact + m * p.K + first);
    task += together;
  }
}
