// The sum chain on a CPU: y[i] = sum_k x[i,k] w_sum[k] + b_sum, in double.
// Who owns what: a call owns rows [begin, end). It takes several rows at a time, so that a piece of
//   w_sum is loaded once for all of them, and keeps vectors of partial sums a row.
// Moves: x once, 4 B K bytes; w_sum (8 K bytes) stays in L2.
// Against rung 2: vectors of partial sums instead of one chain of additions, and each row is asked
//   for two kilobytes ahead, since the hardware's prefetcher alone falls behind.
#include "problem.h"
#include "simd.h"

namespace {

// Tuned on 2 cores with AVX-512 against torch.sum over the same bytes; wb.yardsticks repeats it.
constexpr bool kManyRegisters = kVectorRegisters >= 32;
constexpr int kRows = kManyRegisters ? 6 : 4;
constexpr int kVectors = kManyRegisters ? 4 : 2;
constexpr int kStep = kVectors * kDoubles;
constexpr int kAhead = 512;   // floats
constexpr int kUsedOnce = 0;  // a prefetch that does not displace what is used again

template <int Rows>
void dot_rows(const SumChain& p, int64_t first) {
  doubles sum[Rows][kVectors] = {};
  const float* const x = p.x + first * p.x_stride;
  const int64_t whole = p.K - p.K % kStep;
  for (int64_t k = 0; k < whole; k += kStep) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const float* row = x + r * p.x_stride + k;
      for (int line = 0; line < kStep; line += kLineFloats)
        if (kStep >= kLineFloats || k % kLineFloats == 0)
          __builtin_prefetch(row + kAhead + line, 0, kUsedOnce);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        sum[r][v] += widen(row + v * kDoubles) * load(p.w_sum + k + v * kDoubles);
    }
  }
  for (int r = 0; r < Rows; ++r) {
    doubles partial = sum[r][0];
    for (int v = 1; v < kVectors; ++v) partial += sum[r][v];
    double total = sum_lanes(partial);
    for (int64_t k = whole; k < p.K; ++k)
      total += static_cast<double>(x[r * p.x_stride + k]) * p.w_sum[k];
    p.y[first + r] = static_cast<float>(total + *p.b_sum);
  }
}

}  // namespace

void launch(const SumChain& p, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + kRows <= end; i += kRows) dot_rows<kRows>(p, i);
  for (; i < end; ++i) dot_rows<1>(p, i);
}
