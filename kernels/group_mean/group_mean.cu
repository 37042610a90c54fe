// w[m,k] = 1/pool sum_j W[m pool + j, k] on a GPU, in one launch and a fixed order.
// Who owns what: where groups are many, a warp owns 128 columns of a group, a lane 4 of them in all of
//   its rows; where they are few and long, a block owns them (columns.cuh).
// Moves: W once, 4 N K bytes; w and w_exact, 12 K N / pool.
#include "columns.cuh"
#include "group_mean.h"

constexpr int64_t kLongGroup = 64, kEnough = 1 << 12;  // rows of a group; warps that fill a GPU

template <int Width>
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks)
    warp_group_mean_kernel(GroupMean p, int64_t strips) {
  const int64_t job = blockIdx.x * int64_t{kColumnWarps} + threadIdx.x / kColumnLanes;
  const int64_t m = job / strips;
  const int64_t k = job % strips * kColumnsOfBlock<Width> + threadIdx.x % kColumnLanes * Width;
  if (m >= p.groups || k >= p.K) return;
  double mean[Width];
  mean_of_rows<Width>(mean, p.W + m * p.pool * p.K + k, p.K, p.pool, true);
  give_means<Width>(p.w, p.w_exact, m * p.K + k, mean);
}

template <int Width>
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks)
    group_mean_kernel(GroupMean p, int64_t strips) {
  const int64_t m = blockIdx.x / strips, first = blockIdx.x % strips * kColumnsOfBlock<Width>;
  sum_columns<Width>(p.W + m * p.pool * p.K, p.K, p.K, first, 0, p.pool, [&](int64_t k, double sum) {
    const double mean[1] = {sum / static_cast<double>(p.pool)};
    give_means<1>(p.w, p.w_exact, m * p.K + k, mean);
  });
}

cudaError_t launch(const GroupMean& p, cudaStream_t stream) {
  const bool wide = rows_are_float4(p.W, p.K, p.K) && rows_are_float4(p.w, p.K, p.K);
  const int64_t strips = column_blocks(p.K, wide), jobs = strips * p.groups;
  const bool by_warps = p.pool <= kLongGroup || jobs >= kEnough;
  const int64_t blocks = by_warps ? (jobs + kColumnWarps - 1) / kColumnWarps : jobs;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const auto kernel = by_warps ? (wide ? warp_group_mean_kernel<4> : warp_group_mean_kernel<1>)
                               : (wide ? group_mean_kernel<4> : group_mean_kernel<1>);
  kernel<<<static_cast<unsigned>(blocks), kColumnThreads, 0, stream>>>(p, strips);
  return cudaGetLastError();
}
