// s[k] = sum_n W[n,k] on a GPU, in two launches and a fixed order.
// Who owns what: a block owns 128 columns of one slice of the rows; a lane owns 4 neighbouring
//   columns (16 bytes a load), the 8 warps take every 8th row with 4 loads in flight each. Their
//   sums meet in shared memory; a second kernel adds the slices.
// Moves: W once, 4 N K bytes; 8 K bytes a slice for the partial sums.
#include "column_sum.h"
#include "load.cuh"

constexpr int kThreads = 256, kLanes = 32, kWarps = kThreads / kLanes, kInFlight = 4;

template <int Width>  // columns a lane: 4 where rows start at 16 bytes, else 1
__global__ void __launch_bounds__(kThreads) column_sum_slice_kernel(ColumnSum p) {
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const int64_t k = (blockIdx.x * static_cast<int64_t>(kLanes) + lane) * Width;
  const int64_t rows = (p.N + p.slices - 1) / p.slices;
  const int64_t begin = blockIdx.y * rows, end = min(begin + rows, p.N);
  double sum[Width] = {};
  for (int64_t n = begin + warp; n < end; n += kWarps * kInFlight) {
    float v[kInFlight][Width];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int64_t row = n + u * kWarps;
      load_once<Width>(v[u], p.W + row * p.K + k, row < end && k < p.K);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u)
#pragma unroll
      for (int j = 0; j < Width; ++j) sum[j] += v[u][j];
  }
  __shared__ double scratch[kWarps][kLanes * Width];
#pragma unroll
  for (int j = 0; j < Width; ++j) scratch[warp][lane * Width + j] = sum[j];
  __syncthreads();
  for (int c = threadIdx.x; c < kLanes * Width; c += kThreads) {
    const int64_t column = blockIdx.x * static_cast<int64_t>(kLanes * Width) + c;
    double total = 0;
    for (int w = 0; w < kWarps; ++w) total += scratch[w][c];
    if (column < p.K) p.partial[blockIdx.y * p.K + column] = total;
  }
}

__global__ void __launch_bounds__(kThreads) column_sum_slices_kernel(ColumnSum p) {
  const int64_t k = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (k >= p.K) return;
  double total = 0;
  for (int64_t slice = 0; slice < p.slices; ++slice) total += p.partial[slice * p.K + k];
  p.s[k] = total;
}

cudaError_t launch(const ColumnSum& p, cudaStream_t stream) {
  const bool wide = rows_are_float4(p.W, p.K, p.K);
  const int64_t columns = kLanes * (wide ? 4 : 1);
  const int64_t blocks = (p.K + columns - 1) / columns;
  if (blocks > INT32_MAX || p.slices > 65535) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(p.slices));
  (wide ? column_sum_slice_kernel<4>
        : column_sum_slice_kernel<1>)<<<grid, kThreads, 0, stream>>>(p);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  const unsigned last = static_cast<unsigned>((p.K + kThreads - 1) / kThreads);
  column_sum_slices_kernel<<<last, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
