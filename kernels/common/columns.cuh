// Sums of the columns of some rows of a matrix, in double and in a fixed order.
// Who owns what: a lane owns Width neighbouring columns, the 8 warps of a block take every 8th row with
//   4 loads in flight each; their sums meet in shared memory.
#pragma once
#include "load.cuh"
#include "vector.cuh"

constexpr int kColumnThreads = 256, kColumnLanes = 32, kColumnsInFlight = 4;
constexpr int kColumnWarps = kColumnThreads / kColumnLanes;
// A processor holds at least so many blocks: said, ptxas takes the registers that leaves (sm_100).
constexpr int kColumnBlocks = 4;

// give(k, the block's sum) for each of its columns before K, 32 Width from `first` on, of what the
// threads have summed; by all of a block of kColumnThreads.
template <int Width, class Give>
__device__ __forceinline__ void give_columns(const double (&sum)[Width], int64_t K, int64_t first,
                                             const Give& give) {
  const int lane = threadIdx.x % kColumnLanes, warp = threadIdx.x / kColumnLanes;
  __shared__ double scratch[kColumnWarps][kColumnLanes * Width];
#pragma unroll
  for (int j = 0; j < Width; ++j) scratch[warp][lane * Width + j] = sum[j];
  __syncthreads();
  for (int c = threadIdx.x; c < kColumnLanes * Width; c += kColumnThreads) {
    double found = 0;
    for (int w = 0; w < kColumnWarps; ++w) found += scratch[w][c];
    if (first + c < K) give(first + c, found);
  }
}

// give(k, sum of v[i,k] over rows [begin, end)) for the columns of this block that lie before K. Rows
// of v are `stride` apart; Width 4 where they start at 16 bytes.
template <int Width, class Give>
__device__ __forceinline__ void sum_columns(const float* v, int64_t stride, int64_t K, int64_t first,
                                            int64_t begin, int64_t end, const Give& give) {
  const int lane = threadIdx.x % kColumnLanes, warp = threadIdx.x / kColumnLanes;
  const int64_t k = first + lane * Width;
  double sum[Width] = {};
  for (int64_t i = begin + warp; i < end; i += kColumnWarps * kColumnsInFlight) {
    float taken[kColumnsInFlight][Width];
#pragma unroll
    for (int u = 0; u < kColumnsInFlight; ++u) {
      const int64_t row = i + u * kColumnWarps;
      load_once<Width>(taken[u], v + row * stride + k, row < end && k < K);
    }
#pragma unroll
    for (int u = 0; u < kColumnsInFlight; ++u)
#pragma unroll
      for (int j = 0; j < Width; ++j) sum[j] += taken[u][j];
  }
  give_columns<Width>(sum, K, first, give);
}

// mean <- that of `count` rows of v, `stride` apart, one after the other, for a thread's columns;
// 0 where `inside` is false.
template <int Width>
__device__ __forceinline__ void mean_of_rows(double (&mean)[Width], const float* v, int64_t stride,
                                             int64_t count, bool inside) {
  constexpr int kInFlight = 2 * kColumnsInFlight;
  double sum[Width] = {};
  for (int64_t i = 0; i < count; i += kInFlight) {
    float taken[kInFlight][Width];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u)
      load_once<Width>(taken[u], v + (i + u) * stride, inside && i + u < count);
#pragma unroll
    for (int u = 0; u < kInFlight; ++u)
#pragma unroll
      for (int j = 0; j < Width; ++j) sum[j] += taken[u][j];
  }
#pragma unroll
  for (int j = 0; j < Width; ++j) mean[j] = sum[j] / static_cast<double>(count);
}

// Means in float, and in double where that is not null, Width neighbours at `to`.
template <int Width>
__device__ __forceinline__ void give_means(float* rounded, double* exact, int64_t to,
                                           const double (&mean)[Width]) {
  float single[Width];
#pragma unroll
  for (int j = 0; j < Width; ++j) single[j] = static_cast<float>(mean[j]);
  give<Width>(rounded + to, single);
  if (exact == nullptr) return;
  if constexpr (Width == 4) {
    reinterpret_cast<double2*>(exact + to)[0] = make_double2(mean[0], mean[1]);
    reinterpret_cast<double2*>(exact + to)[1] = make_double2(mean[2], mean[3]);
  } else {
    exact[to] = mean[0];
  }
}

// s[k] = sum over the slices of partial (slices, K), in their order.
static __global__ void __launch_bounds__(kColumnThreads)
    add_slices_kernel(const double* partial, double* s, int64_t slices, int64_t K) {
  const int64_t k = blockIdx.x * static_cast<int64_t>(kColumnThreads) + threadIdx.x;
  if (k >= K) return;
  double total = 0;
  for (int64_t slice = 0; slice < slices; ++slice) total += partial[slice * K + k];
  s[k] = total;
}

// Columns of a block.
template <int Width>
constexpr int64_t kColumnsOfBlock = kColumnLanes * Width;

// Blocks that own all K columns.
inline int64_t column_blocks(int64_t K, bool wide) {
  const int64_t columns = wide ? kColumnsOfBlock<4> : kColumnsOfBlock<1>;
  return (K + columns - 1) / columns;
}

inline cudaError_t launch_sums(const double* partial, double* s, int64_t slices, int64_t K,
                               cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>((K + kColumnThreads - 1) / kColumnThreads);
  add_slices_kernel<<<blocks, kColumnThreads, 0, stream>>>(partial, s, slices, K);
  return cudaGetLastError();
}

// kernel(p), whose block (b, slice) owns the b-th columns of a slice, then the sum of the slices.
template <class P>
cudaError_t launch_slices(void (*kernel)(P), const P& p, bool wide, cudaStream_t stream) {
  const int64_t blocks = column_blocks(p.K, wide);
  if (blocks > INT32_MAX || p.slices > 65535) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(p.slices));
  kernel<<<grid, kColumnThreads, 0, stream>>>(p);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  return launch_sums(p.partial, p.s, p.slices, p.K, stream);
}
