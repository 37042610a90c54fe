// D[m,k] = W[2m,k] - W[2m+1,k] and s[k] = sum_n W[n,k] on a GPU, in two launches and a fixed order.
// Who owns what: a block owns 128 columns of one slice of the pairs of rows. As the column sum's, a lane
//   owns Width neighbouring columns, and the 8 warps take every 8th pair with 4 loads, two pairs, in
//   flight each; their sums meet in shared memory. A second kernel adds the slices.
// Moves: W once, 8 M K bytes; D, 4 M K; 8 K bytes a slice for the partial sums.
#include "columns.cuh"
#include "pair_difference.h"

constexpr int kPairs = kColumnsInFlight / 2;

template <int Width>
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks)
    pair_difference_slice_kernel(PairDifference p) {
  const int lane = threadIdx.x % kColumnLanes, warp = threadIdx.x / kColumnLanes;
  const int64_t first = blockIdx.x * kColumnsOfBlock<Width>, k = first + lane * Width;
  const int64_t pairs = (p.M + p.slices - 1) / p.slices, begin = blockIdx.y * pairs;
  const int64_t end = min(begin + pairs, p.M);
  const int64_t start = begin + warp, step = kColumnWarps * p.K;  // to the next pair in D
  const float* row = p.W + 2 * start * p.K + k;
  float* to = p.D + start * p.K + k;
  double sum[Width] = {};
  for (int64_t m = start; m < end && k < p.K; m += kColumnWarps * kPairs) {
    float a[kPairs][Width], b[kPairs][Width];
#pragma unroll
    for (int u = 0; u < kPairs; ++u) {
      const bool inside = m + u * kColumnWarps < end;
      load_once<Width>(a[u], row + 2 * u * step, inside);
      load_once<Width>(b[u], row + 2 * u * step + p.K, inside);
    }
#pragma unroll
    for (int u = 0; u < kPairs; ++u) {
      float difference[Width];
#pragma unroll
      for (int j = 0; j < Width; ++j) {
        difference[j] = a[u][j] - b[u][j];
        sum[j] += static_cast<double>(a[u][j]) + static_cast<double>(b[u][j]);
      }
      if (m + u * kColumnWarps < end) give<Width>(to + u * step, difference);
    }
    row += 2 * kPairs * step;
    to += kPairs * step;
  }
  double* partial = p.partial + blockIdx.y * p.K;
  give_columns<Width>(sum, p.K, first, [&](int64_t c, double total) { partial[c] = total; });
}

cudaError_t launch(const PairDifference& p, cudaStream_t stream) {
  const bool wide = rows_are_float4(p.W, p.K, p.K) && rows_are_float4(p.D, p.K, p.K);
  return launch_slices(
      wide ? pair_difference_slice_kernel<4> : pair_difference_slice_kernel<1>, p, wide, stream);
}
