// Train mode on a GPU, before the product: the sum of x over the batch, and the centre that is taken
// from it, of each feature the median of the means of a few groups of samples.
//   total[k] = sum_i x[i,k];  c[k] = median_g mean_{i of group g} x[i,k]
// Who owns what: a block owns 128 columns of one slice of a group (columns.cuh); a second launch adds
//   the slices: no atomics.
// Moves: x once, 4 B K bytes; 8 K bytes a slice.
#include "columns.cuh"
#include "dependent_launch.cuh"
#include "problem.h"

// Rows [begin, end) of a slice: kSlices for each group, then one of what is left over.
__device__ __forceinline__ void rows_of(const Centre& p, int slice, int64_t& begin, int64_t& end) {
  const int group = slice / kCentreSlices, part = slice % kCentreSlices;
  const int64_t first = group * p.rows;
  begin = group < p.groups ? first + p.rows * part / kCentreSlices : first;
  end = group < p.groups ? first + p.rows * (part + 1) / kCentreSlices : p.B;
}

template <int Width>
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks)
    batch_slices_kernel(Centre p) {
  wait_for_previous();
  int64_t begin, end;
  rows_of(p, blockIdx.y, begin, end);
  double* partial = p.partial + blockIdx.y * p.K;
  sum_columns<Width>(p.x, p.x_stride, p.K, blockIdx.x * kColumnsOfBlock<Width>, begin, end,
                     [&](int64_t k, double sum) { partial[k] = sum; });
}

// The lower median, by as many exchanges as it takes to have the smaller half in order.
__device__ __forceinline__ float lower_median(float (&v)[kGroups], int count) {
#pragma unroll
  for (int last = kGroups - 1; last > 0; --last)
#pragma unroll
    for (int i = 0; i < kGroups - 1; ++i)
      if (i < last && i + 1 < count && v[i] > v[i + 1]) {
        const float larger = v[i];
        v[i] = v[i + 1], v[i + 1] = larger;
      }
  float found = v[0];
#pragma unroll
  for (int i = 1; i < kGroups; ++i)
    if (i == (count - 1) / 2) found = v[i];
  return found;
}

__global__ void __launch_bounds__(kColumnThreads) batch_centre_kernel(Centre p) {
  wait_for_previous();
  const int64_t k = blockIdx.x * static_cast<int64_t>(kColumnThreads) + threadIdx.x;
  if (k >= p.K) return;
  float means[kGroups];
  double total = p.partial[p.groups * kCentreSlices * p.K + k];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    double sum = 0;
    for (int s = 0; g < p.groups && s < kCentreSlices; ++s)
      sum += p.partial[(g * kCentreSlices + s) * p.K + k];
    total += sum;
    means[g] = static_cast<float>(sum / p.rows);
  }
  p.total[k] = total;
  p.c[k] = lower_median(means, p.groups);
}

cudaError_t launch(const Centre& p, cudaStream_t stream) {
  const bool wide = rows_are_float4(p.x, p.x_stride, p.K);
  const int64_t blocks = column_blocks(p.K, wide);
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks), p.groups * kCentreSlices + 1);
  const auto slices = wide ? batch_slices_kernel<4> : batch_slices_kernel<1>;
  const cudaError_t error = launch_dependent(slices, grid, kColumnThreads, 0, stream, p);
  if (error != cudaSuccess) return error;
  const unsigned last = static_cast<unsigned>((p.K + kColumnThreads - 1) / kColumnThreads);
  return launch_dependent(batch_centre_kernel, last, kColumnThreads, 0, stream, p);
}
