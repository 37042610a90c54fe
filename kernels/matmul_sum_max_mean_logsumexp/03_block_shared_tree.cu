// Rung 3: a block owns a sample, its threads walk the row together, a tree in shared memory adds.
//   y[i] = sum_k x[i,k] w_sum[k] + b_sum
// Who owns what: thread t takes k = t, t + 256, ...; then 8 halvings over 256 partial sums.
// Moves: x once, 4 B K bytes, 128 contiguous bytes a warp and load; w_sum from L1 or L2.
// Against rung 2: loads are coalesced and there are B blocks to hide latency behind.
//   Still 4 bytes a load, and a barrier for each level of the tree.
#include "problem.h"

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) dot_block_shared_tree_kernel(SumChain p) {
  __shared__ double partial[kThreads];
  for (int64_t i = blockIdx.x; i < p.B; i += gridDim.x) {
    const float* x = p.x + i * p.x_stride;
    double sum = 0;
    for (int64_t k = threadIdx.x; k < p.K; k += kThreads)
      sum = fma(static_cast<double>(x[k]), p.w_sum[k], sum);
    partial[threadIdx.x] = sum;
    __syncthreads();
    for (int half = kThreads / 2; half > 0; half /= 2) {
      if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
      __syncthreads();
    }
    if (threadIdx.x == 0) p.y[i] = static_cast<float>(partial[0] + *p.b_sum);
    __syncthreads();  // before the next sample overwrites partial
  }
}

cudaError_t launch(const SumChain& p, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(p.B < (1 << 30) ? p.B : (1 << 30));
  dot_block_shared_tree_kernel<<<blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
