// A control: one block, a thread per sample. Kept to see `check` reject it.
// A block has at most 1024 threads, so a batch of 1025 is not launched at all; many drafts do not
// look at the error of the launch and return whatever the output held.
#include "gelu.h"
#include "problem.h"

__global__ void gelu_scale_max_one_block_kernel(PoolChain p) {
  const int64_t i = threadIdx.x;
  float best = -INFINITY;
  for (int64_t m = 0; m < p.M; ++m)
    best = larger(best, static_cast<float>(p.scale * gelu(p.u[i * p.M + m])));
  p.y[i] = best;
}

cudaError_t launch(const PoolChain& p, cudaStream_t stream) {
  gelu_scale_max_one_block_kernel<<<1, static_cast<unsigned>(p.B), 0, stream>>>(p);
  cudaGetLastError();  // the draft's mistake: looked at by nobody
  return cudaSuccess;
}
