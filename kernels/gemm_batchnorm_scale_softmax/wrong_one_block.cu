// A control: one block, a thread per sample. Kept to see `check` reject it.
// A block has at most 1024 threads, so a batch of 1025 is not launched at all; many drafts do not
// look at the error of the launch and return whatever the output held.
#include "row.cuh"

__global__ void map_softmax_one_block_kernel(Tail p) {
  float* y = p.y + threadIdx.x * p.N;
  Partial row;
  for (int64_t n = 0; n < p.N; ++n) row = merge(row, Partial{y[n] = mapped(p, n, y[n]), 1.f});
  for (int64_t n = 0; n < p.N; ++n) y[n] = expf(y[n] - row.m) / row.s;
}

cudaError_t launch(const Tail& p, cudaStream_t stream) {
  map_softmax_one_block_kernel<<<1, static_cast<unsigned>(p.B), 0, stream>>>(p);
  cudaGetLastError();  // the draft's mistake: looked at by nobody
  return cudaSuccess;
}
