// Rung 1: the chain as it is written, one thread per sample, everything inside.
//   y[i] = scale sum_w max_j (sum_k x[i,k] W[w pool + j, k] + b[w pool + j])
// Who owns what: a thread owns a sample, all N K products of it.
// Moves: all of W (4 N K bytes) for each warp of samples; x as many times, a sector a lane and load.
// Wrong with it: a batch of 128 is four warps, for a machine that wants thousands.
#include "problem.h"

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) linear_maxpool_sum_scale_thread_kernel(Pooled p) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (i >= p.B) return;
  const float* x = p.x + i * p.x_stride;
  double sum = 0;
  for (int64_t first = 0; first + p.pool <= p.N; first += p.pool) {
    float top = -INFINITY;
    for (int64_t n = first; n < first + p.pool; ++n) {
      const float* w = p.W + n * p.K;
      float dot = 0.f;
      for (int64_t k = 0; k < p.K; ++k) dot = fmaf(x[k], w[k], dot);
      top = larger(dot + p.b[n], top);
    }
    sum += top;
  }
  p.y[i] = scaled(sum, p.scale);
}

cudaError_t launch(const Pooled& p, cudaStream_t stream) {
  const int64_t blocks = (p.B + kThreads - 1) / kThreads;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  linear_maxpool_sum_scale_thread_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
