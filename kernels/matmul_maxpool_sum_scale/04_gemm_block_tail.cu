// Rung 4: the product by torch, whole; a block per row for what is left. Any pool.
//   y[i] = scale sum_w max_j z[i, w pool + j],   z = x W^T + b from memory
// Who owns what: a block owns a row of z. A thread takes every 512th window; of windows longer than
//   a warp, a warp takes every 16th and its lanes share the features. Eight windows are in flight.
// Moves: z once, 4 B N bytes, neighbouring windows by neighbouring threads; much of it is in L2.
// Against rung 3: B blocks instead of B threads, and a row is read by all of a block.
//   What remains is the product itself: 2 B K N operations.
#include "load.cuh"
#include "problem.h"
#include "reduce.cuh"

constexpr int kThreads = 512, kWarps = kThreads / kWarp, kAtOnce = 8;

__global__ void __launch_bounds__(kThreads, 2) maxpool_sum_scale_block_kernel(Pooled p) {
  __shared__ double scratch[kWarps];
  const bool by_warp = p.pool >= kWarp;
  const int64_t step = by_warp ? kWarp : 1, teams = by_warp ? kWarps : kThreads;
  const int64_t lane = threadIdx.x % step, team = threadIdx.x / step;
  const int64_t stride = teams * p.pool, last = p.N - p.pool;  // of windows
  for (int64_t i = blockIdx.x; i < p.B; i += gridDim.x) {
    double sum = 0;
    for (int64_t first = team * p.pool; first <= last; first += kAtOnce * stride) {
      const float* z = p.z + i * p.N + first;
      float top[kAtOnce], v[kAtOnce][1];
      for (int64_t j = lane; j < p.pool; j += step) {
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u)
          load_once<1>(v[u], z + u * stride + j, first + u * stride <= last);
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) top[u] = j == lane ? v[u][0] : larger(v[u][0], top[u]);
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        for (int offset = kWarp / 2; by_warp && offset > 0; offset /= 2)
          top[u] = larger(__shfl_xor_sync(kFullWarp, top[u], offset), top[u]);
        if (lane == 0 && first + u * stride <= last) sum += top[u];
      }
    }
    sum = block_sum<kThreads>(sum, scratch);
    if (threadIdx.x == 0) p.y[i] = scaled(sum, p.scale);
    __syncthreads();  // before the next row uses scratch
  }
}

cudaError_t launch(const Pooled& p, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(p.B < (1 << 30) ? p.B : (1 << 30));
  maxpool_sum_scale_block_kernel<<<blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
