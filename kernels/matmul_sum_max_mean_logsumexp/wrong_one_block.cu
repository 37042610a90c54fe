// A control: one block, a thread per sample. Kept to see `check` reject it.
// A block has at most 1024 threads, so a batch of 1025 is not launched at all; many drafts do not
// look at the error of the launch and return whatever the output held.
#include "problem.h"

__global__ void dot_one_block_kernel(SumChain p) {
  const int64_t i = threadIdx.x;
  double sum = 0;
  for (int64_t k = 0; k < p.K; ++k)
    sum = fma(static_cast<double>(p.x[i * p.x_stride + k]), p.w_sum[k], sum);
  p.y[i] = static_cast<float>(sum + *p.b_sum);
}

cudaError_t launch(const SumChain& p, cudaStream_t stream) {
  dot_one_block_kernel<<<1, static_cast<unsigned>(p.B), 0, stream>>>(p);
  cudaGetLastError();  // the draft's mistake: looked at by nobody
  return cudaSuccess;
}
