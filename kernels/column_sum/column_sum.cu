// s[k] = sum_n W[n,k] on a GPU, in two launches and a fixed order.
// Who owns what: a block owns 128 columns of one slice of the rows (columns.cuh); a second kernel adds
//   the slices.
// Moves: W once, 4 N K bytes; 8 K bytes a slice for the partial sums.
#include "column_sum.h"
#include "columns.cuh"

template <int Width>
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks)
    column_sum_slice_kernel(ColumnSum p) {
  const int64_t rows = (p.N + p.slices - 1) / p.slices, begin = blockIdx.y * rows;
  double* partial = p.partial + blockIdx.y * p.K;
  sum_columns<Width>(p.W, p.K, p.K, blockIdx.x * kColumnsOfBlock<Width>, begin,
                     min(begin + rows, p.N), [&](int64_t k, double sum) { partial[k] = sum; });
}

cudaError_t launch(const ColumnSum& p, cudaStream_t stream) {
  const bool wide = rows_are_float4(p.W, p.K, p.K);
  return launch_slices(wide ? column_sum_slice_kernel<4> : column_sum_slice_kernel<1>, p, wide,
                       stream);
}
