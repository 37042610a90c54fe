// Train mode, before the product: half of x less its mean over the batch, and what that mean gives.
//   half[i,k] = (x[i,k] - total[k] / B) / 2;  mean[n] = bias[n] + sum_k W[n,k] total[k] / B
//   then var, and y = exp(t - m) / s as in eval, t = a z + d
// Who owns what: a block owns 256 columns of x and every gridDim.y-th row; a warp owns a feature.
// Moves: x once, half once, 8 B K bytes; W once, 4 N K bytes, beside the product's own reading.
// The mean is subtracted in two float32: rounded to one, it would cost the digits that centring is
//   to keep. Half of the difference: of two finite floats it is finite, and the factor is exact.
#include "load.cuh"
#include "problem.h"
#include "reduce.cuh"

constexpr int kColumns = 256, kFeatures = 8, kInFlight = 8;

__global__ void __launch_bounds__(kColumns) batch_centre_kernel(Centre p) {
  const int64_t k = blockIdx.x * static_cast<int64_t>(kColumns) + threadIdx.x;
  if (k >= p.K) return;
  const double mean = p.total[k] / p.B;
  const float high = static_cast<float>(mean), low = static_cast<float>(mean - high);
  for (int64_t i = blockIdx.y; i < p.B; i += gridDim.y)
    p.half[i * p.K + k] = fmaf(0.5f, p.x[i * p.x_stride + k], -0.5f * high) - 0.5f * low;
}

template <int Width>
__global__ void __launch_bounds__(kFeatures* kWarp) batch_mean_kernel(Mean p) {
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

cudaError_t launch(const Centre& p, cudaStream_t stream) {
  const int64_t blocks = (p.K + kColumns - 1) / kColumns;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;  // the grid's limit in x
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(p.B < 128 ? p.B : 128));
  batch_centre_kernel<<<grid, kColumns, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch(const Mean& p, cudaStream_t stream) {
  const int64_t blocks = (p.N + kFeatures - 1) / kFeatures;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  auto kernel = rows_are_float4(p.W, p.W_stride, p.K) ? batch_mean_kernel<4> : batch_mean_kernel<1>;
  kernel<<<static_cast<unsigned>(blocks), kFeatures * kWarp, 0, stream>>>(p);
  return cudaGetLastError();
}
