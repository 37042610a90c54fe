// What the kernels of a row share: the map, and the merge of (m, s), the maximum of a part of a row
// and the sum of exp(t - m) over it. The merge is associative: parts are lanes, warps or tiles.
#pragma once
#include "problem.h"
#include "reduce.cuh"

struct Partial {
  float m = -INFINITY, s = 0.f;  // of no elements
};

__device__ __forceinline__ float mapped(const Tail& p, int64_t n, float z) {
  return fmaf(p.a[n], z + p.shift[n], p.d[n]);
}

// What is subtracted before exp: the maximum; 0 where all is -inf, since -inf - -inf is NaN.
__device__ __forceinline__ float origin(float m) { return m == -INFINITY ? 0.f : m; }

__device__ __forceinline__ Partial merge(Partial one, Partial other) {
  const float m = fmaxf(one.m, other.m);
  return {m, one.s * expf(one.m - origin(m)) + other.s * expf(other.m - origin(m))};
}

// Every lane receives the merge of the warp's parts; a NaN in one s is a NaN in the merge's s.
__device__ __forceinline__ Partial merge_warp(Partial part) {
  Partial whole = part;
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    whole.m = fmaxf(whole.m, __shfl_xor_sync(kFullWarp, whole.m, offset));
  // rounded before the first addition: every lane has to add the same numbers
  whole.s = __fmul_rn(part.s, expf(part.m - origin(whole.m)));
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    whole.s += __shfl_xor_sync(kFullWarp, whole.s, offset);
  return whole;
}

// The same over a team of threads: a warp, or all of a block.
template <int Team>
__device__ __forceinline__ Partial merge_team(Partial part) {
  static_assert(Team % kWarp == 0 && Team <= kWarp * kWarp, "one warp merges the warps' parts");
  part = merge_warp(part);
  if constexpr (Team > kWarp) {
    __shared__ float m[Team / kWarp], s[Team / kWarp];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    if (lane == 0) m[warp] = part.m, s[warp] = part.s;
    __syncthreads();
    part = merge_warp(lane < Team / kWarp ? Partial{m[lane], s[lane]} : Partial{});
    __syncthreads();  // before the next call overwrites them
  }
  return part;
}

// A grid of one block for each of `jobs`, or of as many as walk them in turn.
inline unsigned blocks_for(int64_t jobs) {
  constexpr int64_t kMost = 1 << 30;
  return static_cast<unsigned>(jobs < kMost ? jobs : kMost);
}
