// A control: one block, a thread per sample. Kept to see `check` reject it.
// A block has at most 1024 threads, so a batch of 1025 is not launched at all; many drafts do not
// look at the error of the launch and return whatever the output held.
#include "problem.h"

__global__ void maxpool_sum_scale_one_block_kernel(Pooled p) {
  const float* z = p.z + threadIdx.x * p.N;
  double sum = 0;
  for (int64_t first = 0; first + p.pool <= p.N; first += p.pool) {
    float top = z[first];
    for (int64_t n = first + 1; n < first + p.pool; ++n) top = larger(z[n], top);
    sum += top;
  }
  p.y[threadIdx.x] = scaled(sum, p.scale);
}

cudaError_t launch(const Pooled& p, cudaStream_t stream) {
  maxpool_sum_scale_one_block_kernel<<<1, static_cast<unsigned>(p.B), 0, stream>>>(p);
  cudaGetLastError();  // the draft's mistake: looked at by nobody
  return cudaSuccess;
}
