// z[i,n] = sum_k x[i,k] W[n,k] on a CPU, for a few rows of x. A tile of features by rows of x stays
// in registers over all of k, a vector of partial sums each: what a library's product adds in one
// chain is here in as many as a vector has lanes, added in double.
// Who owns what: a call owns features, kFeatures at a time, for all rows of x.
// Moves: W once, 4 N K bytes, from memory; its rows come from L2 for the second tile, and x always.
#include "narrow_product.h"

#include <algorithm>

#include "simd.h"

namespace {

// kFeatures * kRows accumulators, and a vector of each row and feature on the way
constexpr int kRows = kVectorRegisters >= 32 ? 5 : 2;
constexpr int64_t kAhead = 256;  // floats

// The next `count` floats, all of a vector's or fewer; zeros follow.
inline floats load_some(const float* address, int64_t count) {
  if (count >= kFloats) return load(address);
  alignas(kVectorBytes) float lanes[kFloats] = {};
  std::copy(address, address + count, lanes);
  return load(lanes);
}

template <int Features, int Rows>
void tile(const NarrowProduct& p, int64_t n, int64_t i, bool first) {
  floats sum[Features][Rows] = {};
  const float *const W = p.W + n * p.W_stride, *const x = p.x + i * p.x_stride;
  const auto add = [&](int64_t k, int64_t count) {
    floats row[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) row[r] = load_some(x + r * p.x_stride + k, count);
#pragma GCC unroll 8
    for (int f = 0; f < Features; ++f) {
      const floats w = load_some(W + f * p.W_stride + k, count);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) sum[f][r] = fused(w, row[r], sum[f][r]);
    }
  };
  const int64_t whole = p.K - p.K % kFloats;
  for (int64_t k = 0; k < whole; k += kFloats) {
    if (first)  // the hardware's prefetcher alone falls behind
      for (int f = 0; f < Features; ++f) __builtin_prefetch(W + f * p.W_stride + k + kAhead);
    add(k, kFloats);
  }
  if (whole < p.K) add(whole, p.K - whole);
  for (int f = 0; f < Features; ++f)
    for (int r = 0; r < Rows; ++r) {
      alignas(kVectorBytes) float lanes[kFloats];
      store(lanes, sum[f][r]);
      const double total = sum_lanes(widen(lanes) + widen(lanes + kDoubles));
      p.z[(i + r) * p.z_stride + n + f] = static_cast<float>(total);
    }
}

template <int Features>
void rows(const NarrowProduct& p, int64_t n) {
  int64_t i = 0;
  for (; i + kRows <= p.B; i += kRows) tile<Features, kRows>(p, n, i, i == 0);
  for (; i < p.B; ++i) tile<Features, 1>(p, n, i, i == 0);
}

}  // namespace

void launch(const NarrowProduct& p, int64_t begin, int64_t end) {
  for (int64_t n = begin * kFeatures; n < std::min(end * kFeatures, p.N);) {
    if (n + kFeatures <= p.N)
      rows<kFeatures>(p, n), n += kFeatures;
    else
      rows<1>(p, n), ++n;
  }
}
