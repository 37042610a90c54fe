// Rung 3: the product goes to the library, on the folded weights; what is left is one tail kernel.
//   u = x w^T + b, by torch;  y[i] = max_m scale * gelu(u[i,m])
// Who owns what: a block owns a sample, a thread every 256th u of its row; two u can win, a tree in
//   shared memory finds them.
// Moves: u once more, 4 B M bytes, which the product has just left in L2.
// Against rung 2: a tile of w serves many samples. Torch's own tail is three kernels: GELU, scale,
//   maximum, each of which writes what the next one reads.
#include "gelu.h"
#include "problem.h"

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) gelu_scale_max_kernel(PoolChain p) {
  __shared__ Ends<float> ends[kThreads];
  const bool dips = p.scale < 0;
  for (int64_t i = blockIdx.x; i < p.B; i += gridDim.x) {
    Ends<float> mine = no_ends<float>(dips);
    for (int64_t m = threadIdx.x; m < p.M; m += kThreads)
      mine = joined(mine, ends_of(p.u[i * p.M + m], dips), dips);
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
  gelu_scale_max_kernel<<<blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
