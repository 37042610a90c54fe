// Rows of x times w, several at a time: chains of a few additions in float, their sums in double.
// A chain's error is that of kChain + 3 roundings, whatever K is; after it nothing is lost.
#pragma once
#include "rounded_dot.h"
#include "simd.h"

// Tuned on 2 cores with AVX-512 against torch.sum over the same bytes; wb.yardsticks repeats it.
constexpr bool kManyRegisters = kVectorRegisters >= 32;
constexpr int kRows = kManyRegisters ? 6 : 4;
constexpr int kVectors = kManyRegisters ? 4 : 2;
constexpr int kChain = 8;  // additions in float, one after the other
constexpr int64_t kBlock = int64_t{kChain} * kVectors * kFloats;  // features between two widenings
constexpr int64_t kStep = int64_t{kVectors} * kDoubles;

// sum: of the products of a row; square: of the squares of its partial sums in float chains.
struct Dot {
  double sum, square;
};

// The partial sums of a row over kBlock features, in double: a chain is added to its neighbours in
// float.
inline doubles widened(const floats* chains) {
  floats all = chains[0] + chains[1];
  if (kVectors == 4) all += chains[2] + chains[3];
  alignas(kVectorBytes) float lanes[kFloats];
  store(lanes, all);
  return widen(lanes) + widen(lanes + kDoubles);
}

// found[r] of row x[r] times w. rounded: w in float, for all but the last features; without it all is
// in double. The order of the additions of a row is the same for any Rows.
template <int Rows>
void dot_rows(const RoundedDot& p, const float* rounded, const float* const* x, Dot* found) {
  doubles sum[Rows] = {}, square[Rows] = {};
  const int64_t whole = rounded ? p.K - p.K % kBlock : 0;
  for (int64_t block = 0; block < whole; block += kBlock) {
    floats chains[Rows][kVectors] = {};
    for (int64_t k = block; k < block + kBlock; k += kVectors * kFloats)
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          chains[r][v] = fused(load(x[r] + k + v * kFloats), load(rounded + k + v * kFloats),
                               chains[r][v]);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const doubles part = widened(chains[r]);
      sum[r] += part, square[r] += part * part;
    }
  }
  doubles rest[Rows][kVectors] = {};
  int64_t k = whole;
  for (; k + kStep <= p.K; k += kStep)
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        rest[r][v] += widen(x[r] + k + v * kDoubles) * load(p.w + k + v * kDoubles);
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kVectors; ++v) sum[r] += rest[r][v];
    found[r] = {sum_lanes(sum[r]), sum_lanes(square[r])};
    for (int64_t j = k; j < p.K; ++j) found[r].sum += static_cast<double>(x[r][j]) * p.w[j];
  }
}
