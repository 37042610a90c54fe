// Rows that the guard has flagged, by direct maxima; all blocks return at once where there are none.
//   y[i] = scale sum_w max_j z[i, 2w + j],   for rows i with flags[i]
// Who owns what: a block owns 128 features for all flagged rows, 32 rows at a time; a warp owns 4 of
//   the rows, a lane 4 neighbouring features, two windows. A tile of x and of W at a time lies in
//   shared memory; products are added in float for kChain k at most, those sums in double.
// The block that ends last adds the parts of all blocks, in a fixed order.
// Moves: W (4 N K bytes) for every 32 flagged rows.
#pragma once
#include "dependent_launch.cuh"
#include "problem.h"
#include "reduce.cuh"

constexpr int kGuardThreads = 256, kGuardRows = 32, kTile = 16, kChain = 64;
constexpr int kFlagsAThread = 16, kSpan = kGuardThreads * kFlagsAThread;  // rows looked at at once
constexpr int kMine = 4;  // rows a warp, features a lane
static_assert(kGuardThreads / kWarp * kMine == kGuardRows, "warps share the rows");
static_assert(kWarp * kMine == kGuardFeatures, "lanes share the features");
static_assert(kChain % kTile == 0, "a chain is whole tiles");

// The flagged rows among kSpan from `first` on, in order, into `rows`; how many, to all threads.
__device__ int flagged_rows(const Pooled& p, int64_t first, int (&rows)[kSpan],
                            int (&counts)[kGuardThreads / kWarp]) {
  const int mine = threadIdx.x * kFlagsAThread, lane = threadIdx.x % kWarp;
  unsigned found = 0;
  for (int f = 0; f < kFlagsAThread; ++f)
    if (first + mine + f < p.B && p.flags[first + mine + f]) found |= 1u << f;
  if (!__syncthreads_or(found)) return 0;
  int upto = __popc(found);  // a running count over the warp
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int before = __shfl_up_sync(kFullWarp, upto, offset);
    if (lane >= offset) upto += before;
  }
  if (lane == kWarp - 1) counts[threadIdx.x / kWarp] = upto;
  __syncthreads();
  int place = upto - __popc(found), total = 0;
  for (int w = 0; w < kGuardThreads / kWarp; ++w) {
    if (w < threadIdx.x / kWarp) place += counts[w];
    total += counts[w];
  }
  for (int f = 0; f < kFlagsAThread; ++f)
    if (found >> f & 1) rows[place++] = mine + f;
  __syncthreads();
  return total;
}

// dots[r][f] = sum_k x[row of the warp's r, k] W[the lane's f, k], in double.
__device__ void dots_of_tile(const Pooled& p, const int64_t (&row)[kGuardRows], int64_t feature,
                             double (&dots)[kMine][kMine]) {
  alignas(16) __shared__ float xs[kTile][kGuardRows];
  alignas(16) __shared__ float ws[kTile][kGuardFeatures + 4];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  float chain[kMine][kMine] = {};
  for (int64_t k0 = 0; k0 < p.K; k0 += kTile) {
    for (int e = threadIdx.x; e < kTile * kGuardRows; e += kGuardThreads) {
      const int64_t k = k0 + e % kTile, i = row[e / kTile];
      xs[e % kTile][e / kTile] = k < p.K && i >= 0 ? p.x[i * p.x_stride + k] : 0.f;
    }
    for (int e = threadIdx.x; e < kTile * kGuardFeatures; e += kGuardThreads) {
      const int64_t k = k0 + e % kTile, n = feature + e / kTile;
      ws[e % kTile][e / kTile] = k < p.K && n < 2 * p.M ? p.W[n * p.K + k] : 0.f;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTile; ++k)
#pragma unroll
      for (int r = 0; r < kMine; ++r)
#pragma unroll
        for (int f = 0; f < kMine; ++f)
          chain[r][f] = fmaf(xs[k][warp * kMine + r], ws[k][lane * kMine + f], chain[r][f]);
    const bool ends = (k0 + kTile) % kChain == 0 || k0 + kTile >= p.K;
#pragma unroll
    for (int r = 0; ends && r < kMine; ++r)
#pragma unroll
      for (int f = 0; f < kMine; ++f) {
        dots[r][f] += chain[r][f];
        chain[r][f] = 0.f;
      }
    __syncthreads();  // before the next tile is written
  }
}

// The larger one; NaN where one is.
__device__ __forceinline__ double larger_double(double u, double v) {
  return u > v || u != u ? u : v;
}

__global__ void __launch_bounds__(kGuardThreads) guard_maxpool_sum_scale_kernel(Pooled p) {
  __shared__ int rows[kSpan], counts[kGuardThreads / kWarp];
  __shared__ int64_t row[kGuardRows];
  __shared__ bool is_last;
  wait_for_previous();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t feature = blockIdx.x * kGuardFeatures, mine = feature + lane * kMine;
  bool any = false;
  for (int64_t first = 0; first < p.B; first += kSpan) {
    const int count = flagged_rows(p, first, rows, counts);
    any |= count > 0;
    for (int start = 0; start < count; start += kGuardRows) {
      if (threadIdx.x < kGuardRows)
        row[threadIdx.x] = start + threadIdx.x < count ? first + rows[start + threadIdx.x] : -1;
      __syncthreads();
      double dots[kMine][kMine] = {};
      dots_of_tile(p, row, feature, dots);
      for (int r = 0; r < kMine; ++r) {
        double sum = 0;
        for (int f = 0; f < kMine; f += 2)
          if (mine + f < 2 * p.M)
            sum += larger_double(dots[r][f] + p.b[mine + f], dots[r][f + 1] + p.b[mine + f + 1]);
        sum = warp_sum(sum);
        const int64_t i = row[warp * kMine + r];
        if (lane == 0 && i >= 0) p.partial[blockIdx.x * p.B + i] = sum;
      }
      __syncthreads();  // before the rows of the next tile
    }
  }
  if (!any) return;
  __threadfence();
  if (threadIdx.x == 0) is_last = atomicAdd(p.done, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int64_t i = threadIdx.x; i < p.B; i += kGuardThreads) {
    if (!p.flags[i]) continue;
    double sum = 0;
    for (int64_t part = 0; part < gridDim.x; ++part) sum += p.partial[part * p.B + i];
    p.y[i] = scaled(sum, p.scale);
  }
}

inline cudaError_t launch_guard(const Pooled& p, cudaStream_t stream) {
  const int64_t blocks = (2 * p.M + kGuardFeatures - 1) / kGuardFeatures;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  return launch_dependent(guard_maxpool_sum_scale_kernel, static_cast<unsigned>(blocks),
                          kGuardThreads, 0, stream, p);
}
