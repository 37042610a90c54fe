// mean, c and half of a batch on a CPU. A call owns strips of columns: their sums by groups of rows go
// in double (rows.h), then the strip is read once more, from L2 where the batch is not too large for it.
// Moves: x once or twice from memory, 4 B K bytes; half, as much.
#include "batch_halves.h"

#include <algorithm>

#include "rows.h"

namespace {

// c <- the lower median of the groups' means, each rounded: exchanges that put the larger half behind it.
// A NaN may be lost: it is in the differences.
void lower_median(const double (*sum)[kStrip], int groups, double rows, int64_t count, float* c) {
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
void ask_for(const float* x, int64_t stride, int64_t count) {
  for (int r = 0; r < Rows; ++r)
    for (int64_t k = 0; k < count; k += 16) __builtin_prefetch(x + r * stride + k);
}

void strip(const BatchHalves& p, int64_t first, int64_t count) {
  const int groups = static_cast<int>(std::min<int64_t>(kGroups, p.B));
  const int64_t each = p.B / groups;
  const float* x = p.x + first;
  double sum[kGroups + 1][kStrip] = {};  // of the groups, then of the rows that are left over
  for (int g = 0; g <= groups; ++g) {
    const float* from = x + g * each * p.x_stride;
    by_eight(g < groups ? each : p.B - groups * each, [&](auto rows, int64_t i) {
      if (g < groups && i + 2 * rows.value <= each)
        ask_for<rows.value>(from + (i + rows.value) * p.x_stride, p.x_stride, count);
      total_together<rows.value>(from + i * p.x_stride, p.x_stride, count,
                                 [&](int64_t k, auto total) { add(sum[g] + k, total); });
    });
  }
  float* c = p.c + first;
  lower_median(sum, groups, static_cast<double>(each), count, c);
  double* mean = p.mean + first;
  for (int64_t k = 0; k < count; ++k) {
    mean[k] = 0;
    for (int g = 0; g <= groups; ++g) mean[k] += sum[g][k];
    mean[k] /= static_cast<double>(p.B);
  }
  float* half = p.half + first;
  for (int64_t i = 0; i < p.B; ++i, x += p.x_stride, half += p.K)
    for (int64_t k = 0; k < count; ++k) half[k] = 0.5f * x[k] - 0.5f * c[k];
  for (int64_t r = 0; r < p.rows; ++r, half += p.K)
    for (int64_t k = 0; k < count; ++k)
      half[k] = (first + k) / p.run % p.rows == r ? static_cast<float>(mean[k]) : 0.0f;
}

}  // namespace

void launch(const BatchHalves& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) strip(p, i * kStrip, std::min(kStrip, p.K - i * kStrip));
}
