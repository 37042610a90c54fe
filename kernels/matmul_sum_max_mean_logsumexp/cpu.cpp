// The sum chain on a CPU: y[i] = sum_k x[i,k] w_sum[k] + b_sum, short chains in float, then double.
// Who owns what: a call owns rows [begin, end). It takes several rows at a time, so that a piece of
//   w_sum is loaded once for all of them, and keeps vectors of partial sums a row.
// Moves: x once, 4 B K bytes; w_sum, rounded to float once a call (4 K bytes), stays in L1 or L2.
// Against rung 2: vectors of partial sums instead of one chain of additions, most of them in float.
//   Where x is in L3, widening it to double takes longer than reading it: here every 32nd sum is.
// Float's range is watched: weights outside of kSmall .. kLarge are taken in double, and rows whose
//   sum is. What a row gives does not depend on the rows beside it.
#include <cmath>
#include <memory>
#include <new>

#include "dot_rows.h"

namespace {

constexpr double kSmall = 0x1p-60, kLarge = 0x1p60;

template <int Rows>
void write_rows(const SumChain& p, const float* w, int64_t first) {
  double total[Rows];
  dot_rows<Rows>(p, w, first, total);
  for (int r = 0; r < Rows; ++r) {
    const double size = std::fabs(total[r]);
    if (w && !(size >= kSmall && size <= kLarge)) dot_rows<1>(p, nullptr, first + r, total + r);
    p.y[first + r] = static_cast<float>(total[r] + *p.b_sum);
  }
}

// w_sum in float; nothing where float's range is not enough, or memory.
std::unique_ptr<float[]> rounded_weights(const SumChain& p) {
  if (p.K < kBlock) return nullptr;
  std::unique_ptr<float[]> w(new (std::nothrow) float[p.K]);
  if (!w) return nullptr;
  int64_t outside = 0;  // counted, since the compiler vectorises a sum
  for (int64_t k = 0; k < p.K; ++k) {
    const double size = std::fabs(p.w_sum[k]);
    outside += (size != 0) & !((size >= kSmall) & (size <= kLarge));
    w[k] = static_cast<float>(p.w_sum[k]);
  }
  return outside ? nullptr : std::move(w);
}

}  // namespace

void launch(const SumChain& p, int64_t begin, int64_t end) {
  const auto w = rounded_weights(p);
  int64_t i = begin;
  for (; i + kRows <= end; i += kRows) write_rows<kRows>(p, w.get(), i);
  for (; i < end; ++i) write_rows<1>(p, w.get(), i);
}
