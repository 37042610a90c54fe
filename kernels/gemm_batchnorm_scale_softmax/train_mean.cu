// Train mode on a GPU, beside the product: the mean that running_mean moves by.
//   mean[n] = sum_k W[n,k] total[k] / B + bias[n]; y = exp(t - m) / s does without it
// Who owns what: a warp owns a feature.
// Moves: W once, 4 N K bytes, beside the product's own reading. In double: the mean may be large.
#include "dependent_launch.cuh"
#include "load.cuh"
#include "problem.h"
#include "reduce.cuh"

constexpr int kFeatures = 8, kInFlight = 8;  // warps of a block; loads of a thread

template <int Width>
__global__ void __launch_bounds__(kFeatures* kWarp) batch_mean_kernel(Mean p) {
  wait_for_previous();
  const int64_t n = blockIdx.x * static_cast<int64_t>(kFeatures) + threadIdx.x / kWarp;
  if (n >= p.N) return;  // a whole warp
  const int lane = threadIdx.x % kWarp;
  double sum = 0;
  for (int64_t start = lane * Width; start < p.K; start += kWarp * Width * kInFlight) {
    float w[kInFlight][Width];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int64_t k = start + u * kWarp * Width;
      load_once<Width>(w[u], p.W + n * p.W_stride + k, k < p.K);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int64_t k = start + u * kWarp * Width;
      if (k < p.K) sum = dot<Width>(w[u], p.total + k, sum);
    }
  }
  sum = warp_sum(sum);
  if (lane == 0) p.mean[n] = static_cast<float>(sum / p.B + p.bias[n]);
}

cudaError_t launch(const Mean& p, cudaStream_t stream) {
  const int64_t blocks = (p.N + kFeatures - 1) / kFeatures;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;  // the grid's limit in x
  auto kernel = rows_are_float4(p.W, p.W_stride, p.K) ? batch_mean_kernel<4> : batch_mean_kernel<1>;
  return launch_dependent(kernel, static_cast<unsigned>(blocks), kFeatures * kWarp, 0, stream, p);
}
