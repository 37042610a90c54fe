// Rows of x times w_sum, several at a time: chains of a few additions in float, their sums in double.
// A chain's error is that of kChain + 3 roundings, whatever K is; after it nothing is lost.
#pragma once
#include "problem.h"
#include "simd.h"

// Tuned on 2 cores with AVX-512 against torch.sum over the same bytes; wb.yardsticks repeats it.
constexpr bool kManyRegisters = kVectorRegisters >= 32;
constexpr int kRows = kManyRegisters ? 6 : 4;
constexpr int kVectors = kManyRegisters ? 4 : 2;
constexpr int kChain = 8;  // additions in float, one after the other
constexpr int64_t kBlock = int64_t{kChain} * kVectors * kFloats;  // features between two widenings
constexpr int64_t kStep = int64_t{kVectors} * kDoubles;

// The partial sums of a row over kBlock features, in double: chains are added to neighbours in float.
inline doubles widened(const floats* chains) {
  floats all = chains[0] + chains[1];
  if (kVectors == 4) all += chains[2] + chains[3];
  alignas(kVectorBytes) float lanes[kFloats];
  store(lanes, all);
  return widen(lanes) + widen(lanes + kDoubles);
}

// total[r] = sum_k x[first + r, k] w_sum[k]. w: w_sum in float, for all but the last features; without
// it the sum is in double. The order of the additions of a row is the same for any Rows.
template <int Rows>
void dot_rows(const SumChain& p, const float* w, int64_t first, double* total) {
  doubles sum[Rows] = {};
  const float* const x = p.x + first * p.x_stride;
  const int64_t rounded = w ? p.K - p.K % kBlock : 0;
  for (int64_t block = 0; block < rounded; block += kBlock) {
    floats chains[Rows][kVectors] = {};
    for (int64_t k = block; k < block + kBlock; k += kVectors * kFloats)
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          chains[r][v] += load(x + r * p.x_stride + k + v * kFloats) * load(w + k + v * kFloats);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) sum[r] += widened(chains[r]);
  }
  for (int r = 0; r < Rows; ++r) {
    const float* row = x + r * p.x_stride;
    doubles part[kVectors] = {};
    int64_t k = rounded;
    for (; k + kStep <= p.K; k += kStep)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        part[v] += widen(row + k + v * kDoubles) * load(p.w_sum + k + v * kDoubles);
    for (int v = 0; v < kVectors; ++v) sum[r] += part[v];
    total[r] = sum_lanes(sum[r]);
    for (; k < p.K; ++k) total[r] += static_cast<double>(row[k]) * p.w_sum[k];
  }
}
