// Sums of the parts of a product, and what a team of threads keeps of a sample.
#pragma once
#include "gelu.h"
#include "load.cuh"
#include "problem.h"

constexpr int kPartsInFlight = 8;

// u[i,m..m+Width) of the parts and b, added in double; asks for 8 parts before it uses any.
template <int Width>
__device__ __forceinline__ void u_of_parts(float (&u)[Width], const PoolChain& p, int64_t i,
                                           int64_t m) {
  double sum[Width] = {};
  for (int64_t first = 0; first < p.parts; first += kPartsInFlight) {
    float v[kPartsInFlight][Width];
#pragma unroll
    for (int s = 0; s < kPartsInFlight; ++s)
      load_once<Width>(v[s], p.u_parts + ((first + s) * p.B + i) * p.M + m, first + s < p.parts);
#pragma unroll
    for (int s = 0; s < kPartsInFlight; ++s)
#pragma unroll
      for (int c = 0; c < Width; ++c) sum[c] += v[s][c];
  }
#pragma unroll
  for (int c = 0; c < Width; ++c) u[c] = static_cast<float>(sum[c] + p.b[m + c]);
}

// Thread 0 of a team of Team threads, a warp or the block, receives what they keep together.
template <int Team>
__device__ __forceinline__ Ends<float> team_ends(Ends<float> mine, bool dips) {
  constexpr int kLanes = 32, kWarps = Team / kLanes;
  static_assert(Team % kLanes == 0 && kWarps <= kLanes, "whole warps, joined by one of them");
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    mine = joined(mine,
                  {__shfl_xor_sync(0xffffffffu, mine.left, offset),
                   __shfl_xor_sync(0xffffffffu, mine.right, offset)},
                  dips);
  if constexpr (kWarps > 1) {
    __shared__ Ends<float> scratch[kWarps];
    if (threadIdx.x % kLanes == 0) scratch[threadIdx.x / kLanes] = mine;
    __syncthreads();
    for (int w = 1; w < kWarps && threadIdx.x == 0; ++w) mine = joined(mine, scratch[w], dips);
  }
  return mine;
}

#ifdef WB_WINNER
// u[i,m] in double: the share of a thread that stands at `start`, the next one `step` further on.
// The bias is with the first.
template <int Width>
__device__ __forceinline__ double share_of_u(const PoolChain& p, int64_t i, int64_t m,
                                             int64_t start, int64_t step) {
  const float *x = p.x + i * p.x_stride, *w = p.w + m * p.K;
  double sum = start ? 0.0 : p.b_exact ? p.b_exact[m] : p.b[m];
#pragma unroll 4
  for (int64_t k = start; k < p.K; k += step) {
    float a[Width], b[Width];
    load_once<Width>(a, x + k, true);
    if (p.w_exact) {
      sum = dot<Width>(a, p.w_exact + m * p.K + k, sum);
    } else {
      load_once<Width>(b, w + k, true);
#pragma unroll
      for (int j = 0; j < Width; ++j) sum = fma(static_cast<double>(a[j]), double(b[j]), sum);
    }
  }
  return sum;
}
#endif
