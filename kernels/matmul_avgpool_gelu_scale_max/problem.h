// Linear -> mean of `pool` neighbouring features -> GELU -> scale -> max.
//
//     u[i,m] = 1/pool sum_j z[i, m pool + j] = sum_k x[i,k] w[m,k] + b[m],   m < M = N / pool
//     y[i] = max_m scale * gelu(u[i,m])
//
// z = x W^T + bias; w and b are means of `pool` neighbouring rows of W and bias, made once. Features
// from M pool on are dropped. This header is all that the binding, the launchers and the kernels
// share. No torch in it.
#pragma once
#include <cstdint>

struct PoolChain {
#if defined(WB_CHAIN)  // the chain as written
  const float* x;      // (B, K), rows x_stride elements apart, features adjacent
  const float* W;      // (N, K) contiguous
  const float* bias;   // (N)
  int64_t pool;
#elif defined(WB_FOLDED)   // the folded chain, its product inside
  const float* x;  // as above
  const float* w;  // (M, K) contiguous
  const float* b;  // (M)
#elif defined(WB_PRODUCT)  // after torch's product
  const float* u;  // (B, M) contiguous
#elif defined(WB_PARTS)    // after torch's product, its sum over k cut in parts
  const float* u_parts;  // (parts, B, M) contiguous: u without b is their sum
  const float* b;        // (M)
  int64_t parts;
#else                      // after torch's product, and what it takes to compute a u once more
  const float* x;                   // as above
  const float* w;                   // (M, K) contiguous
  const float* b;                   // (M)
  const double *w_exact, *b_exact;  // the same in double; nullptr where w and b are exact
#if defined(WB_WINNER)
  const float* u_parts;  // as above
  int64_t parts;
#else  // blocks
  const float* u;  // (B, count) contiguous: features first <= m < first + count
  float* ends;     // (B, 2) the two u of the features so far that can win
  int64_t* at;     // (B, 2) the features they belong to
  int64_t first, count;
#endif
#endif
  float* y;  // (B)
  int64_t B, K, M;
  int64_t x_stride;  // elements from a row of x to the next
  double scale;
};

#ifdef WB_CUDA
#include <cuda_runtime.h>
// A rung of the ladder defines this; it returns the error of its launch.
cudaError_t launch(const PoolChain& p, cudaStream_t stream);
#else
// A CPU rung defines this: rows begin <= i < end, called from several threads at once.
void launch(const PoolChain& p, int64_t begin, int64_t end);
#endif
