// What is split: rows of W, or what a fold makes of `group` of them. A thread owns Width neighbouring
// columns from k on.
//   ask(asked, p, row, step, end, k): for kAtOnce rows of V, `step` apart, zeros from `end` on
//   make(v, asked): what they are, once they have come
//   give(p, row, k, v), finish(p, first): what a fold writes beside the halves
#pragma once
#include "columns.cuh"
#include "reduce.cuh"
#include "split_weights.h"

template <int Width>
struct WholeRows {
  using Number = float;
  static constexpr int kAtOnce = 4;
  struct Asked {
    float a[kAtOnce][Width];
  };

  __device__ __forceinline__ void ask(Asked& asked, const SplitWeights& p, int64_t row,
                                      int64_t step, int64_t end, int64_t k) {
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      load_once<Width>(asked.a[u], p.W + (row + u * step) * p.stride + k, row + u * step < end);
  }
  __device__ __forceinline__ void make(Number (&v)[kAtOnce][Width], const Asked& asked) {
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
#pragma unroll
      for (int j = 0; j < Width; ++j) v[u][j] = asked.a[u][j];
  }
  __device__ __forceinline__ void give(const SplitWeights&, int64_t, int64_t,
                                       const Number (&)[Width]) {}
  __device__ __forceinline__ void finish(const SplitWeights&, int64_t) {}
};

// Differences of pairs of the bias, and its sum, by a block.
__device__ __forceinline__ void fold_bias(const SplitWeights& p) {
  __shared__ double scratch[kColumnWarps];
  double sum = 0;
#pragma unroll 8
  for (int64_t m = threadIdx.x; m < p.rows; m += kColumnThreads) {
    const double even = __ldg(p.bias + 2 * m), odd = __ldg(p.bias + 2 * m + 1);
    p.shift[m] = even - odd;
    sum += even + odd;
  }
  sum = block_sum<kColumnThreads>(sum, scratch);
  if (threadIdx.x == 0) *p.total = sum;
}

// Rounded to float; beside it the sums of W's columns over a slice, in double.
template <int Width>
struct Differences {
  using Number = float;
  static constexpr int kAtOnce = 2;
  struct Asked {
    float a[kAtOnce][Width], b[kAtOnce][Width];
  };
  double sum[Width] = {};

  __device__ __forceinline__ void ask(Asked& asked, const SplitWeights& p, int64_t row,
                                      int64_t step, int64_t end, int64_t k) {
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const float* first = p.W + 2 * (row + u * step) * p.stride + k;
      load_once<Width>(asked.a[u], first, row + u * step < end);
      load_once<Width>(asked.b[u], first + p.stride, row + u * step < end);
    }
  }
  __device__ __forceinline__ void make(Number (&v)[kAtOnce][Width], const Asked& asked) {
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
#pragma unroll
      for (int j = 0; j < Width; ++j) {
        v[u][j] = asked.a[u][j] - asked.b[u][j];
        sum[j] += static_cast<double>(asked.a[u][j]) + static_cast<double>(asked.b[u][j]);
      }
  }
  __device__ __forceinline__ void give(const SplitWeights&, int64_t, int64_t,
                                       const Number (&)[Width]) {}
  __device__ __forceinline__ void finish(const SplitWeights& p, int64_t first) {
    double* partial = p.partial + blockIdx.y * p.K;
    give_columns<Width>(sum, p.K, first, [&](int64_t k, double total) { partial[k] = total; });
    if (blockIdx.x == 0 && blockIdx.y == 0) fold_bias(p);
  }
};

// In double, and kept so; the mean in float beside it. Rows of a group are as many as stay in flight.
template <int Width>
struct Means {
  using Number = double;
  static constexpr int kAtOnce = 1;
  struct Asked {
    const float* first;
    int64_t stride, group;
    bool inside;
  };

  __device__ __forceinline__ void ask(Asked& asked, const SplitWeights& p, int64_t row, int64_t,
                                      int64_t end, int64_t k) {
    asked = {p.W + row * p.group * p.stride + k, p.stride, p.group, row < end};
  }
  __device__ __forceinline__ void make(Number (&v)[kAtOnce][Width], const Asked& asked) {
    mean_of_rows<Width>(v[0], asked.first, asked.stride, asked.group, asked.inside);
  }
  __device__ __forceinline__ void give(const SplitWeights& p, int64_t row, int64_t k,
                                       const Number (&v)[Width]) {
    give_means<Width>(p.mean, p.mean_exact, row * p.K + k, v);
  }
  __device__ __forceinline__ void finish(const SplitWeights&, int64_t) {}
};
