// A task owns columns of a slice of the rows, and adds them eight rows at a time (rows.h); at last the
// slices are added, in their order.
// Moves: W once, 4 N K bytes.
#include "sum_fold.h"

#include <algorithm>
#include <cmath>

#include "rows.h"

namespace {

constexpr double kCoherent = 6;  // times a random sum's size; of 8192 normal ones the largest has 4
constexpr double kLarge = 0x1p60;  // beyond it, and below its inverse, products leave float's range

// Sums of squares on their way: of whole vectors of columns, and of columns that are left over.
struct Squares {
  doubles together = {};
  double alone = 0;

  void take(doubles v) { together += v; }
  void take(double v) { alone += v; }
};

bool may_be_short(const SumFold& p, double square) {
  double most = 0, least = kLarge;
  for (int64_t k = 0; k < p.K && most == most; ++k) {
    const double size = std::abs(p.w_sum[k]);
    most = size > most || size != size ? size : most;  // a NaN stays
    least = std::min(least, size == 0 ? kLarge : size);
  }
  const double size = std::sqrt(square / p.K);
  return p.K > 0 && most <= kCoherent * size && most <= kLarge && least >= 1 / kLarge;
}

}  // namespace

void add_rows(const SumFold& p, int64_t begin, int64_t end) {
  const int64_t blocks = (p.K + kColumns - 1) / kColumns;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t slice = task / blocks, first = task % blocks * kColumns;
    const int64_t from = p.N * slice / p.slices, rows = p.N * (slice + 1) / p.slices - from;
    const int64_t count = std::min(kColumns, p.K - first);
    double* sum = p.sum + slice * p.K + first;
    std::fill(sum, sum + count, 0.0);
    Squares square;
    by_eight(rows, [&](auto together, int64_t n) {
      total_together<together.value, true>(p.W + (from + n) * p.K + first, p.K, count,
                                           [&](int64_t k, auto total, auto squares) {
                                             add(sum + k, total);
                                             square.take(squares);
                                           });
    });
    p.squares[task] = sum_lanes(square.together) + square.alone;
  }
}

bool finish(const SumFold& p) {
  std::copy(p.sum, p.sum + p.K, p.w_sum);
  for (int64_t s = 1; s < p.slices; ++s)
    for (int64_t k = 0; k < p.K; ++k) p.w_sum[k] += p.sum[s * p.K + k];
  for (int64_t k = 0; k < p.K; ++k) p.rounded[k] = static_cast<float>(p.w_sum[k]);
  double square = 0, total = 0;
  for (int64_t task = 0; task < tasks_of(p); ++task) square += p.squares[task];
  for (int64_t n = 0; n < p.N; ++n) total += p.bias[n];
  *p.b_sum = total;
  return may_be_short(p, square);
}
