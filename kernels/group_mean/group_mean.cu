// w[m,k] = 1/pool sum_j W[m pool + j, k] on a GPU, in one launch and a fixed order.
// Who owns what: a block owns 128 columns of one group (columns.cuh).
// Moves: W once, 4 N K bytes; w and w_exact, 12 K N / pool.
#include "columns.cuh"
#include "group_mean.h"

template <int Width>
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks)
    group_mean_kernel(GroupMean p, int64_t strips) {
  const int64_t m = blockIdx.x / strips, first = blockIdx.x % strips * kColumnsOfBlock<Width>;
  sum_columns<Width>(p.W + m * p.pool * p.K, p.K, p.K, first, 0, p.pool, [&](int64_t k, double sum) {
    const double mean = sum / static_cast<double>(p.pool);
    p.w[m * p.K + k] = static_cast<float>(mean);
    if (p.w_exact) p.w_exact[m * p.K + k] = mean;
  });
}

cudaError_t launch(const GroupMean& p, cudaStream_t stream) {
  const bool wide = rows_are_float4(p.W, p.K, p.K);
  const int64_t strips = column_blocks(p.K, wide), blocks = strips * p.groups;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  auto kernel = wide ? group_mean_kernel<4> : group_mean_kernel<1>;
  kernel<<<static_cast<unsigned>(blocks), kColumnThreads, 0, stream>>>(p, strips);
  return cudaGetLastError();
}
