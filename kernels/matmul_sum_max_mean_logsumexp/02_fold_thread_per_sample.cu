// Rung 2: the algebra. W is summed over its rows once, outside; one dot product a sample is left.
//   y[i] = sum_k x[i,k] w_sum[k] + b_sum
// Who owns what: one thread, one sample, all of K.
// Moves: x once, 4 B K bytes; but the 32 lanes of a warp stand in 32 different rows: a load
//   touches 32 sectors of 32 bytes, and 1024 samples make 32 warps for 132 multiprocessors.
// Against rung 1: N times fewer operations and bytes. Nothing hides the latency of memory.
#include "problem.h"

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) dot_thread_per_sample_kernel(SumChain p) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (i >= p.B) return;
  const float* x = p.x + i * p.x_stride;
  double sum = 0;
  for (int64_t k = 0; k < p.K; ++k) sum = fma(static_cast<double>(x[k]), p.w_sum[k], sum);
  p.y[i] = static_cast<float>(sum + *p.b_sum);
}

cudaError_t launch(const SumChain& p, cudaStream_t stream) {
  const int64_t blocks = (p.B + kThreads - 1) / kThreads;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  dot_thread_per_sample_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
