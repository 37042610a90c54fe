// A product with a few short columns on a CPU: a tile of rows by vectors of features in registers, one
// chain of additions each. For a short k, where the sums over lanes of dot_tiles.h would take longer than
// the products.
#pragma once
#include <algorithm>

#include "simd.h"

// kTall * kVectors accumulators, and a vector of W each on the way
constexpr int kTall = kVectorRegisters >= 32 ? 8 : 4, kVectors = kVectorRegisters >= 32 ? 3 : 2;
constexpr int64_t kPanel = kVectors * kFloats;  // features
constexpr int64_t kChain = 128;                 // of k: a panel of W^T stays in L1

// x (rows, K) times a panel of W^T (K, kPanel), to z of `outs` features.
struct Outer {
  const float *x, *panel;
  float* z;
  int64_t x_stride, z_stride, K, outs;
  bool adds;  // z has what came from the features before
};

// panel <- W^T of `outs` rows of W, zeros up to kPanel.
inline void turn(const float* W, int64_t stride, int64_t outs, int64_t K, float* panel) {
  for (int64_t n = 0; n < outs; ++n)
    for (int64_t k = 0; k < K; ++k) panel[k * kPanel + n] = W[n * stride + k];
  for (int64_t k = 0; k < K && outs < kPanel; ++k)
    std::fill(panel + k * kPanel + outs, panel + (k + 1) * kPanel, 0.0f);
}

inline void write_some(float* z, floats found, int64_t count, bool adds) {
  if (count >= kFloats) return store(z, adds ? load(z) + found : found);
  float lanes[kFloats];
  store(lanes, found);
  for (int64_t j = 0; j < count; ++j) z[j] = adds ? z[j] + lanes[j] : lanes[j];
}

template <int Vectors, int Rows>
inline void outer_tile(const Outer& p) {
  floats sum[Rows][Vectors] = {};
  for (int64_t k = 0; k < p.K; ++k) {
    floats w[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) w[v] = load(p.panel + k * kPanel + v * kFloats);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const floats x = p.x[r * p.x_stride + k] - floats{};  // in all lanes, also a zero's sign
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sum[r][v] = fused(w[v], x, sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v)
      write_some(p.z + r * p.z_stride + v * kFloats, sum[r][v], p.outs - v * kFloats, p.adds);
}

// `rows` rows: Rows of them together while there are as many, of what is left half as many.
template <int Vectors, int Rows = kTall>
inline void outer_rows(Outer p, int64_t rows) {
  for (; rows >= Rows; rows -= Rows, p.x += Rows * p.x_stride, p.z += Rows * p.z_stride)
    outer_tile<Vectors, Rows>(p);
  if constexpr (Rows > 1) outer_rows<Vectors, Rows / 2>(p, rows);
}

// As many vectors as `outs` features need.
template <int Vectors = kVectors>
inline void outer_product(const Outer& p, int64_t rows) {
  if constexpr (Vectors > 1)
    if (p.outs <= (Vectors - 1) * kFloats) return outer_product<Vectors - 1>(p, rows);
  outer_rows<Vectors>(p, rows);
}
