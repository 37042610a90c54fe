// s[k] = sum_n W[n,k] on a CPU (rows.h). A task is a strip of columns; strips that follow one another
// are taken together, so that memory is read in long rows.
// Moves: W once, 4 N K bytes.
#include "column_sum.h"

#include <algorithm>

#include "rows.h"

void launch(const ColumnSum& p, int64_t begin, int64_t end) {
  const int64_t last = std::min(end * kStrip, p.K);
  for (int64_t first = begin * kStrip; first < last; first += kWide) {
    const int64_t count = std::min(kWide, last - first);
    double* sum = p.s + first;
    std::fill(sum, sum + count, 0.0);
    by_eight(p.N, [&](auto together, int64_t n) {
      const float* a = p.W + n * p.K + first;
      total_together<together.value>(a, p.K, count,
                                     [&](int64_t k, auto total) { add(sum + k, total); });
    });
  }
}
