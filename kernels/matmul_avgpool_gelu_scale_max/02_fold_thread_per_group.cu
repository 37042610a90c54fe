// Rung 2: the algebra. The means of the rows of W are made once, outside; a dot product a group.
//   u[m] = sum_k x[k] w[m,k] + b[m];  y = max_m scale * gelu(u[m])
// Who owns what: a block owns a sample; a thread takes every 256th group; of the u it has seen it
//   keeps the two that can win, and a tree in shared memory joins those of the threads.
// Moves: all of w (4 M K bytes) for each sample, mostly from L2.
// Against rung 1: `pool` times fewer operations and bytes, two GELUs a sample. The lanes of a warp
//   still stand in 32 rows: each load touches 32 sectors, and nothing that is loaded is used twice.
#include "gelu.h"
#include "problem.h"

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) folded_linear_gelu_scale_max_kernel(PoolChain p) {
  __shared__ Ends<float> ends[kThreads];
  const bool dips = p.scale < 0;
  for (int64_t i = blockIdx.x; i < p.B; i += gridDim.x) {
    const float* x = p.x + i * p.x_stride;
    Ends<float> mine = no_ends<float>(dips);
    for (int64_t m = threadIdx.x; m < p.M; m += kThreads) {
      const float* w = p.w + m * p.K;
      float dot = 0;
      for (int64_t k = 0; k < p.K; ++k) dot = fmaf(x[k], w[k], dot);
      mine = joined(mine, ends_of(dot + p.b[m], dips), dips);
    }
    ends[threadIdx.x] = mine;
    __syncthreads();
    for (int half = kThreads / 2; half > 0; half /= 2) {
      if (threadIdx.x < half)
        ends[threadIdx.x] = joined(ends[threadIdx.x], ends[threadIdx.x + half], dips);
      __syncthreads();
    }
    if (threadIdx.x == 0) p.y[i] = highest(ends[0], p.scale);
    __syncthreads();  // before the next sample overwrites ends
  }
}

cudaError_t launch(const PoolChain& p, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(p.B < (1 << 30) ? p.B : (1 << 30));
  folded_linear_gelu_scale_max_kernel<<<blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
