// Sums over a warp and over a block, in a fixed order: two runs agree to the last bit.
#pragma once

constexpr int kWarp = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

// Every lane receives the sum over the warp (butterfly: 5 exchanges for 32 lanes).
__device__ __forceinline__ double warp_sum(double value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    value += __shfl_xor_sync(kFullWarp, value, offset);
  return value;
}

// Thread 0 receives the sum over a block of Threads; `scratch` holds one double a warp.
template <int Threads>
__device__ __forceinline__ double block_sum(double value, double (&scratch)[Threads / kWarp]) {
  static_assert(Threads % kWarp == 0 && Threads <= kWarp * kWarp, "one warp sums the warps' sums");
  value = warp_sum(value);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  if (threadIdx.x < kWarp)
    value = warp_sum(threadIdx.x < Threads / kWarp ? scratch[threadIdx.x] : 0.0);
  return value;
}
