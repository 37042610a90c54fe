// Linear -> sum -> max -> mean -> logsumexp -> logsumexp, the last four over one element.
//
//     y[i] = sum_n (sum_k x[i,k] W[n,k] + b[n]) = sum_k x[i,k] w_sum[k] + b_sum
//     w_sum[k] = sum_n W[n,k],  b_sum = sum_n b[n]
//
// This header is all that the binding, the launchers and the kernels share. No torch in it.
#pragma once
#include <cstdint>

struct SumChain {
  const float* x;  // (B, K), rows x_stride elements apart, features adjacent
#ifdef WB_CHAIN    // the chain as written
  const float* W;  // (N, K) contiguous
  const float* b;  // (N)
  int64_t N;
#else  // the folded chain
  const double* w_sum;  // (K) in double: no fold can cancel or overflow
  const double* b_sum;  // (1)
#endif
  float* y;  // (B)
  int64_t B, K;
  int64_t x_stride;  // elements from a row of x to the next
};

#ifdef WB_CUDA
#include <cuda_runtime.h>
// A rung of the ladder defines this; it returns the error of its launch.
cudaError_t launch(const SumChain& p, cudaStream_t stream);
#else
// A CPU rung defines this: rows begin <= i < end, called from several threads at once.
void launch(const SumChain& p, int64_t begin, int64_t end);
#endif
