// Rung 1: the chain in one kernel, as one would write it first. The `pool` rows of W that make a mean
// are summed inside, at each call.
//   u[m] = 1/pool sum_j (sum_k x[k] W[m pool + j, k] + bias[m pool + j]);  y = max_m scale * gelu(u[m])
// Who owns what: a block owns a sample; a thread takes every 256th group m, all of its rows; a tree
//   in shared memory finds the maximum.
// Moves: all of W (4 N K bytes) for each sample, 4 B N K bytes in all, mostly from L2.
// Wrong with it: `pool` times the operations that the mean needs; neighbours `pool` K floats apart.
#include "gelu.h"
#include "problem.h"

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) linear_avgpool_gelu_scale_max_kernel(PoolChain p) {
  __shared__ float best[kThreads];
  for (int64_t i = blockIdx.x; i < p.B; i += gridDim.x) {
    const float* x = p.x + i * p.x_stride;
    float mine = -INFINITY;
    for (int64_t m = threadIdx.x; m < p.M; m += kThreads) {
      const float* W = p.W + m * p.pool * p.K;
      float sum = 0;
      for (int64_t j = 0; j < p.pool; ++j) {
        float dot = 0;
        for (int64_t k = 0; k < p.K; ++k) dot = fmaf(x[k], W[j * p.K + k], dot);
        sum += dot + p.bias[m * p.pool + j];
      }
      mine = larger(mine, static_cast<float>(p.scale * gelu(sum / p.pool)));
    }
    best[threadIdx.x] = mine;
    __syncthreads();
    for (int half = kThreads / 2; half > 0; half /= 2) {
      if (threadIdx.x < half)
        best[threadIdx.x] = larger(best[threadIdx.x], best[threadIdx.x + half]);
      __syncthreads();
    }
    if (threadIdx.x == 0) p.y[i] = best[0];
    __syncthreads();  // before the next sample overwrites best
  }
}

cudaError_t launch(const PoolChain& p, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(p.B < (1 << 30) ? p.B : (1 << 30));
  linear_avgpool_gelu_scale_max_kernel<<<blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
