// Rung 3: the product by torch, whole; a thread per row for what is left.
//   y[i] = scale sum_w max_j z[i, w pool + j],   z = x W^T + b from memory
// Who owns what: a thread owns a row of z, all N features of it.
// Moves: z once, 4 B N bytes, but the lanes of a warp stand in 32 rows: a sector each and load.
// Against rung 2: W is read once for the whole batch, by a product that keeps the machine busy.
#include "problem.h"

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) maxpool_sum_scale_thread_kernel(Pooled p) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (i >= p.B) return;
  const float* z = p.z + i * p.N;
  double sum = 0;
  for (int64_t first = 0; first + p.pool <= p.N; first += p.pool) {
    float top = z[first];
    for (int64_t n = first + 1; n < first + p.pool; ++n) top = larger(z[n], top);
    sum += top;
  }
  p.y[i] = scaled(sum, p.scale);
}

cudaError_t launch(const Pooled& p, cudaStream_t stream) {
  const int64_t blocks = (p.B + kThreads - 1) / kThreads;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  maxpool_sum_scale_thread_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
