// The two u that can win, of a warp or of a block.
#pragma once
#include "gelu.h"

// Lane 0 of a team of Team threads receives what they keep together; Team is a warp or the block.
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
