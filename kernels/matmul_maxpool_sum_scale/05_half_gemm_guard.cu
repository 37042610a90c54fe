// Rung 5: half the product. torch multiplies by the differences of paired rows, g = x D^T; this adds
// up what is left, and flags the rows where that cancels; a second launch computes those directly.
//   y[i] = scale / pool (sum_k x[i,k] w_sum[k] + b_sum + sum_m |g[i,m] + c[m]|)
// Who owns what: a block owns a row, of x and of g; all sums in double, in a fixed order.
// Moves: x and g once, 4 B (K + N / 2) bytes, much of them in L2; w_sum 8 K bytes a row, from L2.
// Flags a row where sum_m |g[i,m]|, which the product has rounded, exceeds limit |A + B|.
// Against rung 4: half of the operations and of the weights' bytes, and no z.
#include "dependent_launch.cuh"
#include "guard.cuh"
#include "load.cuh"
#include "problem.h"
#include "reduce.cuh"

constexpr int kThreads = 512;

template <int WideX, int WideG>  // floats a load: 4 where the alignment allows it, else 1
__global__ void __launch_bounds__(kThreads) half_maxpool_sum_scale_kernel(Pooled p) {
  __shared__ double scratch[2][kThreads / kWarp];
  wait_for_previous();
  const int64_t i = blockIdx.x;
  const float *x = p.x + i * p.x_stride, *g = p.g + i * p.M;
  double sum = 0, size = 0;
#pragma unroll 4
  for (int64_t k = threadIdx.x * WideX; k < p.K; k += kThreads * WideX) {
    float v[WideX];
    load_once<WideX>(v, x + k, true);
    sum = dot<WideX>(v, p.w_sum + k, sum);
  }
#pragma unroll 4
  for (int64_t m = threadIdx.x * WideG; m < p.M; m += kThreads * WideG) {
    float v[WideG];
    load_once<WideG>(v, g + m, true);
#pragma unroll
    for (int u = 0; u < WideG; ++u) {
      sum += fabs(static_cast<double>(v[u]) + p.c[m + u]);
      size += fabs(static_cast<double>(v[u]));
    }
  }
  sum = block_sum<kThreads>(sum, scratch[0]) + *p.b_sum;
  size = block_sum<kThreads>(size, scratch[1]);
  if (threadIdx.x > 0) return;
  p.y[i] = scaled(sum / p.pool, p.scale);
  if (p.M > 0) p.flags[i] = !(size <= p.limit * fabs(sum) && sum - sum == 0);  // NaN is flagged
  if (i == 0 && p.M > 0) *p.done = 0;
}

cudaError_t launch(const Pooled& p, cudaStream_t stream) {
  if (p.B > INT32_MAX) return cudaErrorInvalidConfiguration;  // the grid's limit in x
  const bool wide_x = rows_are_float4(p.x, p.x_stride, p.K), wide_g = p.M % 4 == 0;
  auto kernel =
      wide_x ? (wide_g ? half_maxpool_sum_scale_kernel<4, 4> : half_maxpool_sum_scale_kernel<4, 1>)
             : (wide_g ? half_maxpool_sum_scale_kernel<1, 4> : half_maxpool_sum_scale_kernel<1, 1>);
  const unsigned blocks = static_cast<unsigned>(p.B);
  const cudaError_t error = launch_dependent(kernel, blocks, kThreads, 0, stream, p);
  return error != cudaSuccess || p.M == 0 ? error : launch_guard(p, stream);
}
