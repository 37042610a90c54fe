// Train mode, behind the product: the variance of every feature over the batch, and its map.
//   var[n] = 4 sum_i z[i,n]^2 / B, since z is of half of the centred x and has mean 0
//   then y = exp(t - m) / s as in eval, t = a z + d, a = 2 gamma scale / sqrt(var + eps)
// Who owns what: a block owns 32 lanes of 1 or 4 features in one slice of the batch, its 8 warps
//   every 8th row; their sums meet in shared memory, a second launch adds the slices: no atomics.
// Moves: z once, 4 B N bytes; 8 N bytes a slice. In double: no square can overflow.
#include "load.cuh"
#include "problem.h"

constexpr int kSquareThreads = 256, kLanes = 32, kRows = kSquareThreads / kLanes, kAtOnce = 4;

template <int Width>
__global__ void __launch_bounds__(kSquareThreads) batch_squares_kernel(Statistics p) {
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const int64_t n = (blockIdx.x * static_cast<int64_t>(kLanes) + lane) * Width;
  const int64_t rows = (p.B + p.slices - 1) / p.slices;
  const int64_t begin = blockIdx.y * rows, end = min(begin + rows, p.B);
  double sum[Width] = {};
  for (int64_t i = begin + warp; i < end; i += kRows * kAtOnce) {
    float z[kAtOnce][Width];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t row = i + u * kRows;
      load_once<Width>(z[u], p.z + row * p.N + n, row < end && n < p.N);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
#pragma unroll
      for (int j = 0; j < Width; ++j) sum[j] = fma(double(z[u][j]), double(z[u][j]), sum[j]);
  }
  __shared__ double scratch[kRows][kLanes * Width];
#pragma unroll
  for (int j = 0; j < Width; ++j) scratch[warp][lane * Width + j] = sum[j];
  __syncthreads();
  for (int c = threadIdx.x; c < kLanes * Width; c += kSquareThreads) {
    const int64_t feature = blockIdx.x * static_cast<int64_t>(kLanes * Width) + c;
    double total = 0;
    for (int w = 0; w < kRows; ++w) total += scratch[w][c];
    if (feature < p.N) p.partial[blockIdx.y * p.N + feature] = total;
  }
}

__global__ void __launch_bounds__(kSquareThreads) batch_map_kernel(Statistics p) {
  const int64_t n = blockIdx.x * static_cast<int64_t>(kSquareThreads) + threadIdx.x;
  if (n >= p.N) return;
  double squares = 0;
  for (int64_t slice = 0; slice < p.slices; ++slice) squares += p.partial[slice * p.N + n];
  write_feature(p, n, squares);
}

cudaError_t launch(const Statistics& p, cudaStream_t stream) {
  const bool wide = rows_are_float4(p.z, p.N, p.N);
  const int64_t features = kLanes * (wide ? 4 : 1), blocks = (p.N + features - 1) / features;
  if (blocks > INT32_MAX || p.slices > 65535) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(p.slices));
  (wide ? batch_squares_kernel<4>
        : batch_squares_kernel<1>)<<<grid, kSquareThreads, 0, stream>>>(p);
  const int64_t all = (p.N + kSquareThreads - 1) / kSquareThreads;
  batch_map_kernel<<<static_cast<unsigned>(all), kSquareThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
