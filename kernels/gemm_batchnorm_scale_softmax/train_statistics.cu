// Train mode on a GPU, behind the product: mean and variance of z over the batch, and the map.
//   sums of z - z[0] and of its square; then y = exp(t - m) / s with t = a (z - mean_i z) + d
// Who owns what: a block owns 32 lanes of 1 or 4 features in one slice of the batch, its 8 warps
//   every 8th row; sums meet in shared memory, a second launch adds the slices: no atomics.
// Moves: z once, 4 B N bytes; 16 N bytes a slice.
// In double, from the first row on: no square overflows, and of equal rows the variance is 0.
#include "dependent_launch.cuh"
#include "load.cuh"
#include "problem.h"

constexpr int kBatchThreads = 256, kLanes = 32, kRows = kBatchThreads / kLanes, kAtOnce = 4;

template <int Width>
__global__ void __launch_bounds__(kBatchThreads) batch_sums_kernel(Statistics p) {
  wait_for_previous();
  constexpr int kSums = 2 * Width;  // of the differences, then of their squares
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const int64_t n = (blockIdx.x * static_cast<int64_t>(kLanes) + lane) * Width;
  const int64_t rows = (p.B + p.slices - 1) / p.slices, end = min((blockIdx.y + 1) * rows, p.B);
  float top[Width];
  load_once<Width>(top, p.z + n, n < p.N);
  double sum[kSums] = {};
  for (int64_t i = blockIdx.y * rows + warp; i < end; i += kRows * kAtOnce) {
    float z[kAtOnce][Width];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      load_once<Width>(z[u], p.z + (i + u * kRows) * p.N + n, i + u * kRows < end && n < p.N);
#pragma unroll
    for (int u = 0; u < kAtOnce * Width; ++u) {
      const int row = u / Width, j = u % Width;
      const double d = i + row * kRows < end ? static_cast<double>(z[row][j]) - top[j] : 0.0;
      sum[j] += d;
      sum[Width + j] = fma(d, d, sum[Width + j]);
    }
  }
  __shared__ double scratch[kRows][kSums][kLanes];
  for (int j = 0; j < kSums; ++j) scratch[warp][j][lane] = sum[j];
  __syncthreads();
  for (int j = warp; j < kSums; j += kRows) {
    double total = 0;
    for (int w = 0; w < kRows; ++w) total += scratch[w][j][lane];
    if (n < p.N) p.partial[(blockIdx.y * 2 + j / Width) * p.N + n + j % Width] = total;
  }
}

__global__ void __launch_bounds__(kBatchThreads) batch_map_kernel(Statistics p) {
  wait_for_previous();
  const int64_t n = blockIdx.x * static_cast<int64_t>(kBatchThreads) + threadIdx.x;
  double sum = 0, square = 0;
  for (int64_t slice = 0; n < p.N && slice < p.slices; ++slice) {
    sum += p.partial[2 * slice * p.N + n];
    square += p.partial[(2 * slice + 1) * p.N + n];
  }
  if (n < p.N) write_feature(p, n, sum, square);
}

cudaError_t launch(const Statistics& p, cudaStream_t stream) {
  const bool wide = rows_are_float4(p.z, p.N, p.N);
  const int64_t features = kLanes * (wide ? 4 : 1), blocks = (p.N + features - 1) / features;
  if (blocks > INT32_MAX || p.slices > 65535) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(p.slices));
  const auto sums = wide ? batch_sums_kernel<4> : batch_sums_kernel<1>;
  const cudaError_t error = launch_dependent(sums, grid, kBatchThreads, 0, stream, p);
  if (error != cudaSuccess) return error;
  const unsigned last = static_cast<unsigned>(p.N / kBatchThreads + 1);
  return launch_dependent(batch_map_kernel, last, kBatchThreads, 0, stream, p);
}
