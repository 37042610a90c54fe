// Linear -> MaxPool1d over features -> sum -> scale.
//
//     z[i,n] = sum_k x[i,k] W[n,k] + b[n]
//     y[i] = scale sum_w max_{j < pool} z[i, w pool + j],   w < N / pool: features left over drop
//
// Two numbers have max(u, v) = (u + v + |u - v|) / 2, so that for pool 2
//
//     y[i] = scale / 2 (A[i] + B[i])
//     A[i] = sum_k x[i,k] w_sum[k] + b_sum      w_sum = sum_n W[n], b_sum = sum_n b[n]
//     B[i] = sum_m |g[i,m] + c[m]|              g = x D^T, D[m] = W[2m] - W[2m+1]
//                                               c[m] = b[2m] - b[2m+1]
//
// This header is all that the binding, the launchers and the kernels share. No torch in it.
#pragma once
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define WB_BOTH __host__ __device__ __forceinline__
#else
#define WB_BOTH inline
#endif

// The larger one; NaN where one is, as torch's pools have it.
WB_BOTH float larger(float u, float v) { return u > v || u != u ? u : v; }

// sum * scale in double, rounded once; a sum beyond float32 is infinite before it is scaled.
WB_BOTH float scaled(double sum, double scale) {
  const float rounded = static_cast<float>(sum);
  const bool fits = rounded - rounded == 0;
  return fits ? static_cast<float>(sum * scale) : rounded * static_cast<float>(scale);
}

#if defined(WB_CHAIN)  // the chain as written
struct Pooled {
  const float* x;  // (B, K), rows x_stride elements apart, features adjacent
  const float* W;  // (N, K) contiguous
  const float* b;  // (N)
  float* y;        // (B)
  int64_t B, K, N, pool;
  int64_t x_stride;  // elements from a row of x to the next
  double scale;
};
#elif defined(WB_TAIL)    // what is left after the product
struct Pooled {
  const float* z;  // (B, N) contiguous
#ifdef WB_BIAS
  const float* b;  // (N), which z is without
#endif
  float* y;  // (B)
  int64_t B, N, pool;
  double scale;
};
#elif defined(WB_BLOCKS)  // a block of the product's columns, while it is in the cache
struct Pooled {
  const float* x;       // (B, K), rows x_stride elements apart, features adjacent
  const double* w_sum;  // (K)
  const float* z;       // (B, N), rows z_stride elements apart: a block of z, or of g
  const double* c;      // (N), for a block of g
  double* sums;         // (B, 3): x . w_sum, maxima of windows or |g + c|, |z|; added to
  int64_t B, K, N;
  int64_t pool;  // 0: z is a block of g
  int64_t x_stride, z_stride;
};
#else                     // half the product, and a guard
struct Pooled {
  const float* x;       // (B, K), rows x_stride elements apart, features adjacent
  const float* g;       // (B, M) contiguous, M = N / 2; M = 0 for pool 1
  const double* c;      // (M) in double, as w_sum and b_sum: biases cancel without a trace
  const double* w_sum;  // (K)
  const double* b_sum;  // (1)
  const float* W;       // (N, K) contiguous, for rows that the guard flags
  const float* b;       // (N)
  float* y;             // (B)
  uint8_t* flags;       // (B): rows whose sum cancels
  unsigned* done;       // (1): blocks that have computed their part of the flagged rows
  double* partial;      // (ceil(N / kGuardFeatures), B): those parts
  int64_t B, K, M, N, pool;
  int64_t x_stride;
  double scale;
  double limit;  // of sum_m |g[i,m]| over |A + B|
};

constexpr int64_t kGuardFeatures = 128;
#endif

#ifdef WB_CUDA
#include <cuda_runtime.h>
// A rung of the ladder defines this; it returns the error of its launch.
cudaError_t launch(const Pooled& p, cudaStream_t stream);
#else
// A CPU rung defines this: rows begin <= i < end, called from several threads at once.
void launch(const Pooled& p, int64_t begin, int64_t end);
#endif
