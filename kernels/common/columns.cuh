// Sums of the columns of some rows of a matrix, in double and in a fixed order.
// Who owns what: a lane owns Width neighbouring columns, the 8 warps of a block take every 8th row with
//   4 loads in flight each; their sums meet in shared memory.
#pragma once
#include "load.cuh"

constexpr int kColumnThreads = 256, kColumnLanes = 32, kColumnsInFlight = 4;
constexpr int kColumnWarps = kColumnThreads / kColumnLanes;
// A processor holds at least so many blocks: said, ptxas takes the registers that leaves (sm_100).
constexpr int kColumnBlocks = 4;

// give(k, sum of v[i,k] over rows [begin, end)) for the columns of this block, 32 Width from `first` on
// that lie before K; by all of a block of kColumnThreads. Rows of v are `stride` apart; Width 4 where
// they start at 16 bytes.
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

// Columns of a block.
template <int Width>
constexpr int64_t kColumnsOfBlock = kColumnLanes * Width;

// Blocks that own all K columns.
inline int64_t column_blocks(int64_t K, bool wide) {
  const int64_t columns = wide ? kColumnsOfBlock<4> : kColumnsOfBlock<1>;
  return (K + columns - 1) / columns;
}
