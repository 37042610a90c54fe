// A control: the maximum of a window by fmaxf. Kept to see `check` reject it.
// fmaxf returns the number where the other one is NaN; torch's pools return NaN.
#include "problem.h"

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) maxpool_sum_scale_fmaxf_kernel(Pooled p) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (i >= p.B) return;
  double sum = 0;
  for (int64_t first = 0; first + p.pool <= p.N; first += p.pool) {
    float top = -INFINITY;
    for (int64_t n = first; n < first + p.pool; ++n) top = fmaxf(p.z[i * p.N + n], top);
    sum += top;
  }
  p.y[i] = scaled(sum, p.scale);
}

cudaError_t launch(const Pooled& p, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>((p.B + kThreads - 1) / kThreads);
  maxpool_sum_scale_fmaxf_kernel<<<blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
