// w[m,k] = 1/pool sum_j W[m pool + j, k] on a GPU, in one launch and a fixed order.
// Who owns what: a block owns 128 columns of one group; a lane owns 4 neighbouring columns (16 bytes
//   a load), the 8 warps take every 8th row of the group with 4 loads in flight each. Their sums
//   meet in shared memory.
// Moves: W once, 4 N K bytes; w and w_exact, 12 K N / pool.
#include "group_mean.h"
#include "load.cuh"

constexpr int kThreads = 256, kLanes = 32, kWarps = kThreads / kLanes, kInFlight = 4;

template <int Width>  // columns a lane: 4 where rows start at 16 bytes, else 1
__global__ void __launch_bounds__(kThreads) group_mean_kernel(GroupMean p, int64_t strips) {
  constexpr int kColumns = kLanes * Width;
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const int64_t m = blockIdx.x / strips, first = blockIdx.x % strips * kColumns;
  const int64_t k = first + lane * Width;
  const float* W = p.W + m * p.pool * p.K + k;
  double sum[Width] = {};
  for (int64_t j = warp; j < p.pool; j += kWarps * kInFlight) {
    float v[kInFlight][Width];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int64_t row = j + u * kWarps;
      load_once<Width>(v[u], W + row * p.K, row < p.pool && k < p.K);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u)
#pragma unroll
      for (int c = 0; c < Width; ++c) sum[c] += v[u][c];
  }
  __shared__ double scratch[kWarps][kColumns];
#pragma unroll
  for (int c = 0; c < Width; ++c) scratch[warp][lane * Width + c] = sum[c];
  __syncthreads();
  for (int c = threadIdx.x; c < kColumns; c += kThreads) {
    double total = 0;
    for (int w = 0; w < kWarps; ++w) total += scratch[w][c];
    const int64_t at = m * p.K + first + c;
    const double mean = total / static_cast<double>(p.pool);
    if (first + c < p.K) p.w[at] = static_cast<float>(mean);
    if (first + c < p.K && p.w_exact) p.w_exact[at] = mean;
  }
}

cudaError_t launch(const GroupMean& p, cudaStream_t stream) {
  const bool wide = rows_are_float4(p.W, p.K, p.K);
  const int64_t columns = kLanes * (wide ? 4 : 1), strips = (p.K + columns - 1) / columns;
  const int64_t blocks = strips * p.groups;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  auto kernel = wide ? group_mean_kernel<4> : group_mean_kernel<1>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p, strips);
  return cudaGetLastError();
}
