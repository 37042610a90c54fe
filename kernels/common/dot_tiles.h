// Dot products of rows by rows on a CPU, a tile of them in registers over all of k: a vector of partial
// sums each. What a library's product adds in one chain is here in as many as a vector has lanes, then
// a tree.
#pragma once
#include <algorithm>

#include "simd.h"

// kFeatures * kRows accumulators, and a vector of each row and feature on the way
constexpr int kFeatures = 4, kRows = kVectorRegisters >= 32 ? 6 : 2;
constexpr int64_t kAhead = 256;        // floats
constexpr int64_t kNear = 512 * 1024;  // bytes of W in L2
constexpr int64_t kLongest = 4096;     // of k at once: kRows rows of it stay in L2 beside them

// What a tile reads and writes: `Rows` rows of x, W from its first feature on, features k ... k + K.
struct Piece {
  const float *x, *W;
  float* z;
  int64_t K, x_stride, W_stride, z_stride;
  bool first, adds;  // W is not in the cache yet; z has what came from the features before k
};

// Features * Rows sums, of each row by feature, as many at once as a vector has lanes.
template <int Features, int Rows>
inline void write(const floats (&sum)[Rows][Features], const Piece& p) {
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
      if (first + j < kSums) {
        float& z = p.z[(first + j) / Features * p.z_stride + (first + j) % Features];
        z = p.adds ? z + found[j] : found[j];
      }
  }
}

template <int Features, int Rows>
inline void tile(const Piece& p) {
  floats sum[Rows][Features] = {};
  const auto add = [&](int64_t k, int64_t count) {
    floats row[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) row[r] = load_some(p.x + r * p.x_stride + k, count);
#pragma GCC unroll 8
    for (int f = 0; f < Features; ++f) {
      const floats w = load_some(p.W + f * p.W_stride + k, count);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) sum[r][f] = fused(w, row[r], sum[r][f]);
    }
  };
  const int64_t whole = p.K - p.K % kFloats;
  for (int64_t k = 0; k < whole; k += kFloats) {
    if (p.first)  // the hardware's prefetcher alone falls behind
      for (int f = 0; f < Features; ++f) __builtin_prefetch(p.W + f * p.W_stride + k + kAhead);
    add(k, kFloats);
  }
  if (whole < p.K) add(whole, p.K - whole);
  write(sum, p);
}

// `count` features of `Rows` rows.
template <int Rows>
inline void rows(Piece p, int64_t count) {
  for (; count >= kFeatures; count -= kFeatures, p.W += kFeatures * p.W_stride, p.z += kFeatures)
    tile<kFeatures, Rows>(p);
  for (; count > 0; --count, p.W += p.W_stride, ++p.z) tile<1, Rows>(p);
}

// The same of fewer rows than `Rows`.
template <int Rows>
inline void fewer(const Piece& p, int64_t count, int64_t there) {
  if constexpr (Rows > 1) {
    if (there == Rows - 1) return rows<Rows - 1>(p, count);
    fewer<Rows - 1>(p, count, there);
  }
}

// `count` features of `there` rows, kRows or fewer.
inline void dots(const Piece& p, int64_t count, int64_t there) {
  if (there >= kRows)
    rows<kRows>(p, count);
  else
    fewer<kRows>(p, count, there);
}

// The length of the pieces that a long k is cut into: whole vectors, none longer than kLongest.
inline int64_t piece_of(int64_t K) {
  const int64_t pieces = (K + kLongest - 1) / kLongest;
  const int64_t vectors = (K + kFloats - 1) / kFloats;
  return pieces > 1 ? (vectors + pieces - 1) / pieces * kFloats : kLongest;
}

// Features whose weights, `length` of each, stay in L2.
inline int64_t near_of(int64_t K, int64_t length) {
  const int64_t fit =
      kNear / static_cast<int64_t>(sizeof(float)) / std::clamp<int64_t>(K, 1, length);
  return std::max<int64_t>(kFeatures, fit / kFeatures * kFeatures);
}
