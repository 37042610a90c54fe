// z[i,n] = sum_k x[i,k] W[n,k] on a CPU. A tile of features by rows of x stays in registers over all of
// k, a vector of partial sums each: what a library's product adds in one chain is here in as many as a
// vector has lanes, then a tree.
// Who owns what: a call owns features, for all rows of x; kFeatures of them go together.
// Moves: W once, 4 N K bytes, from memory, for blocks of it stay in L2 while the rows of x go by, kRows
// at a time, in L1 where they are short.
#include "narrow_product.h"

#include <algorithm>

#include "simd.h"

namespace {

// kFeatures * kRows accumulators, and a vector of each row and feature on the way
constexpr int kRows = kVectorRegisters >= 32 ? 6 : 2;
constexpr int64_t kAhead = 256;        // floats
constexpr int64_t kNear = 512 * 1024;  // bytes of W in L2

// Features * Rows sums, of each row by feature, as many at once as a vector has lanes.
template <int Features, int Rows>
void write(const floats (&sum)[Rows][Features], float* z, int64_t stride) {
  constexpr int kSums = Features * Rows;
#pragma GCC unroll 8
  for (int first = 0; first < kSums; first += kFloats) {
    floats lanes[kFloats];
#pragma GCC unroll 16
    for (int j = 0; j < kFloats; ++j)
      lanes[j] = first + j < kSums ? sum[(first + j) / Features][(first + j) % Features] : floats{};
    float found[kFloats];
    store(found, sums_of_lanes(lanes));
#pragma GCC unroll 16
    for (int j = 0; j < kFloats; ++j)
      if (first + j < kSums) z[(first + j) / Features * stride + (first + j) % Features] = found[j];
  }
}

template <int Features, int Rows>
void tile(const NarrowProduct& p, int64_t n, int64_t i, bool first) {
  floats sum[Rows][Features] = {};
  const float *const W = p.W + n * p.W_stride, *const x = p.x + i * p.x_stride;
  const auto add = [&](int64_t k, int64_t count) {
    floats row[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) row[r] = load_some(x + r * p.x_stride + k, count);
#pragma GCC unroll 8
    for (int f = 0; f < Features; ++f) {
      const floats w = load_some(W + f * p.W_stride + k, count);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) sum[r][f] = fused(w, row[r], sum[r][f]);
    }
  };
  const int64_t whole = p.K - p.K % kFloats;
  for (int64_t k = 0; k < whole; k += kFloats) {
    if (first)  // the hardware's prefetcher alone falls behind
      for (int f = 0; f < Features; ++f) __builtin_prefetch(W + f * p.W_stride + k + kAhead);
    add(k, kFloats);
  }
  if (whole < p.K) add(whole, p.K - whole);
  write(sum, p.z + i * p.z_stride + n, p.z_stride);
}

// Features [n, end) of `Rows` rows from i on.
template <int Rows>
void rows(const NarrowProduct& p, int64_t n, int64_t end, int64_t i) {
  for (; n + kFeatures <= end; n += kFeatures) tile<kFeatures, Rows>(p, n, i, i == 0);
  for (; n < end; ++n) tile<1, Rows>(p, n, i, i == 0);
}

// The rows from i on, fewer than `Rows`.
template <int Rows>
void rest(const NarrowProduct& p, int64_t n, int64_t end, int64_t i) {
  if constexpr (Rows > 1) {
    if (p.B - i == Rows - 1) return rows<Rows - 1>(p, n, end, i);
    rest<Rows - 1>(p, n, end, i);
  }
}

}  // namespace

void launch(const NarrowProduct& p, int64_t begin, int64_t end) {
  const int64_t last = std::min(end * kFeatures, p.N);
  const int64_t fit = kNear / static_cast<int64_t>(sizeof(float)) / std::max<int64_t>(p.K, 1);
  const int64_t block = std::max(kFeatures, fit / kFeatures * kFeatures);
  for (int64_t n = begin * kFeatures; n < last; n += block) {
    const int64_t to = std::min(n + block, last);
    int64_t i = 0;
    for (; i + kRows <= p.B; i += kRows) rows<kRows>(p, n, to, i);
    rest<kRows>(p, n, to, i);
  }
}
