// Rung 2: a block per sample, a warp per window, both rows of a pair in one loop over k.
//   y[i] = scale sum_w max_j (sum_k x[i,k] W[w pool + j, k] + b[w pool + j])
// Who owns what: the 8 warps of a block take every 8th window of its sample; lanes share k.
// Moves: all of W (4 N K bytes) for each sample, B times what reading W once takes; x from L1.
// Against rung 1: loads are coalesced, a load of x serves two rows of W, B blocks instead of warps.
#include "problem.h"
#include "reduce.cuh"

constexpr int kThreads = 256, kWarps = kThreads / kWarp;

__global__ void __launch_bounds__(kThreads) linear_maxpool_sum_scale_block_kernel(Pooled p) {
  __shared__ double scratch[kWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int64_t i = blockIdx.x; i < p.B; i += gridDim.x) {
    const float* x = p.x + i * p.x_stride;
    double sum = 0;
    for (int64_t first = warp * p.pool; first + p.pool <= p.N; first += kWarps * p.pool) {
      float top = -INFINITY;
      for (int64_t n = first; n < first + p.pool; n += 2) {
        const int64_t next = n + 1 < first + p.pool ? n + 1 : n;  // an odd pool ends alone
        const float *u = p.W + n * p.K, *v = p.W + next * p.K;
        float of_u = 0.f, of_v = 0.f;
        for (int64_t k = lane; k < p.K; k += kWarp) {
          of_u = fmaf(x[k], u[k], of_u);
          of_v = fmaf(x[k], v[k], of_v);
        }
        top = larger(static_cast<float>(warp_sum(of_u)) + p.b[n], top);
        top = larger(static_cast<float>(warp_sum(of_v)) + p.b[next], top);
      }
      if (lane == 0) sum += top;
    }
    sum = block_sum<kThreads>(sum, scratch);
    if (threadIdx.x == 0) p.y[i] = scaled(sum, p.scale);
    __syncthreads();  // before the next sample uses scratch
  }
}

cudaError_t launch(const Pooled& p, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(p.B < (1 << 30) ? p.B : (1 << 30));
  linear_maxpool_sum_scale_block_kernel<<<blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
