// A control: logsumexp typed as it reads, log(exp(x)). Kept to see `check` reject it.
// expf overflows float32 above 88.7, where the chain itself is finite: a large row becomes inf.
#include "problem.h"
#include "reduce.cuh"

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) dot_log_exp_kernel(SumChain p) {
  __shared__ double scratch[kThreads / kWarp];
  for (int64_t i = blockIdx.x; i < p.B; i += gridDim.x) {
    double sum = 0;
    for (int64_t k = threadIdx.x; k < p.K; k += kThreads)
      sum = fma(static_cast<double>(p.x[i * p.x_stride + k]), p.w_sum[k], sum);
    const float row = static_cast<float>(block_sum<kThreads>(sum, scratch) + *p.b_sum);
    if (threadIdx.x == 0) p.y[i] = logf(expf(logf(expf(row))));
    __syncthreads();
  }
}

cudaError_t launch(const SumChain& p, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(p.B < (1 << 30) ? p.B : (1 << 30));
  dot_log_exp_kernel<<<blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
