// Train mode on a GPU, before the product: the sum of x over the batch, and the centre that is taken
// from it, of each feature the median of the means of a few groups of samples.
//   total[k] = sum_i x[i,k];  c[k] = median_g mean_{i of group g} x[i,k]
//   then z = (x - c) W^T, and y = exp(t - m) / s with t = a (z - mean_i z) + d
// Who owns what: a block owns 32 lanes of 1 or 4 columns in one slice of a group, its 8 warps every
//   8th row; sums meet in shared memory, a second launch adds the slices: no atomics.
// Moves: x once, 4 B K bytes; 8 K bytes a slice.
#include "load.cuh"
#include "problem.h"

constexpr int kCentreThreads = 256, kCentreLanes = 32, kCentreWarps = kCentreThreads / kCentreLanes;
constexpr int kCentreInFlight = 4;
constexpr int kCentreResident = 5;  // blocks: without a word ptxas wants 8 for sm_100, and spills

// Rows [begin, end) of a slice: kSlices for each group, then one of what is left over.
__device__ __forceinline__ void rows_of(const Centre& p, int slice, int64_t& begin, int64_t& end) {
  const int group = slice / kCentreSlices, part = slice % kCentreSlices;
  const int64_t first = group * p.rows;
  begin = group < p.groups ? first + p.rows * part / kCentreSlices : first;
  end = group < p.groups ? first + p.rows * (part + 1) / kCentreSlices : p.B;
}

template <int Width>
__global__ void __launch_bounds__(kCentreThreads, kCentreResident) batch_slices_kernel(Centre p) {
  const int lane = threadIdx.x % kCentreLanes, warp = threadIdx.x / kCentreLanes;
  const int64_t k = (blockIdx.x * static_cast<int64_t>(kCentreLanes) + lane) * Width;
  int64_t begin, end;
  rows_of(p, blockIdx.y, begin, end);
  double sum[Width] = {};
  for (int64_t i = begin + warp; i < end; i += kCentreWarps * kCentreInFlight) {
    float v[kCentreInFlight][Width];
#pragma unroll
    for (int u = 0; u < kCentreInFlight; ++u) {
      const int64_t row = i + u * kCentreWarps;
      load_once<Width>(v[u], p.x + row * p.x_stride + k, row < end && k < p.K);
    }
#pragma unroll
    for (int u = 0; u < kCentreInFlight; ++u)
#pragma unroll
      for (int j = 0; j < Width; ++j) sum[j] += v[u][j];
  }
  __shared__ double scratch[kCentreWarps][kCentreLanes * Width];
#pragma unroll
  for (int j = 0; j < Width; ++j) scratch[warp][lane * Width + j] = sum[j];
  __syncthreads();
  for (int at = threadIdx.x; at < kCentreLanes * Width; at += kCentreThreads) {
    const int64_t column = blockIdx.x * static_cast<int64_t>(kCentreLanes * Width) + at;
    double total = 0;
    for (int w = 0; w < kCentreWarps; ++w) total += scratch[w][at];
    if (column < p.K) p.partial[blockIdx.y * p.K + column] = total;
  }
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

__global__ void __launch_bounds__(kCentreThreads) batch_centre_kernel(Centre p) {
  const int64_t k = blockIdx.x * static_cast<int64_t>(kCentreThreads) + threadIdx.x;
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
  const int64_t columns = kCentreLanes * (wide ? 4 : 1), blocks = (p.K + columns - 1) / columns;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks), p.groups * kCentreSlices + 1);
  (wide ? batch_slices_kernel<4> : batch_slices_kernel<1>)<<<grid, kCentreThreads, 0, stream>>>(p);
  const unsigned last = static_cast<unsigned>((p.K + kCentreThreads - 1) / kCentreThreads);
  batch_centre_kernel<<<last, kCentreThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
