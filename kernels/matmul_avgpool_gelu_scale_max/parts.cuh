// Sums of the parts of a product, and what a team of threads keeps of a sample.
#pragma once
#include "gelu.h"
#include "load.cuh"
#include "problem.h"

constexpr int kPartsInFlight = 8;

// The parts first, first + step, ... of u[i,m..m+Width) without b, added in double; asks for 8 of them
// before it uses any.
template <int Width>
__device__ __forceinline__ void share_of_parts(double (&sum)[Width], const PoolChain& p, int64_t i,
                                               int64_t m, int64_t first, int64_t step) {
#pragma unroll
  for (int c = 0; c < Width; ++c) sum[c] = 0;
  for (int64_t part = first; part < p.parts; part += kPartsInFlight * step) {
    float v[kPartsInFlight][Width];
#pragma unroll
    for (int s = 0; s < kPartsInFlight; ++s)
      load_once<Width>(v[s], p.u_parts + ((part + s * step) * p.B + i) * p.M + m,
                       part + s * step < p.parts);
#pragma unroll
    for (int s = 0; s < kPartsInFlight; ++s)
#pragma unroll
      for (int c = 0; c < Width; ++c) sum[c] += v[s][c];
  }
}

// u[i,m..m+Width), from all parts and b.
template <int Width>
__device__ __forceinline__ void u_of_parts(float (&u)[Width], const PoolChain& p, int64_t i,
                                           int64_t m) {
  double sum[Width];
  share_of_parts(sum, p, i, m, 0, 1);
#pragma unroll
  for (int c = 0; c < Width; ++c) u[c] = static_cast<float>(sum[c] + p.b[m + c]);
}

// All threads of a team of Team, a warp or the block, receive what they keep together.
template <int Team>
__device__ __forceinline__ Ends<float> team_ends(Ends<float> mine, bool dips) {
  constexpr int kLanes = 32, kWarps = Team / kLanes;
  static_assert(Team % kLanes == 0 && kWarps <= kLanes, "whole warps, joined by each of them");
  const auto of_lanes = [dips](Ends<float> e) {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2)
      e = joined(e,
                 {__shfl_xor_sync(0xffffffffu, e.left, offset),
                  __shfl_xor_sync(0xffffffffu, e.right, offset)},
                 dips);
    return e;
  };
  mine = of_lanes(mine);
  if constexpr (kWarps > 1) {
    __shared__ Ends<float> scratch[kWarps];
    const int lane = threadIdx.x % kLanes;
    if (lane == 0) scratch[threadIdx.x / kLanes] = mine;
    __syncthreads();
    mine = of_lanes(lane < kWarps ? scratch[lane] : no_ends<float>(dips));
  }
  return mine;
}
