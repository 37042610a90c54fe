// Rung 4: 16-byte loads, w_sum shared between several rows in flight, warps add by shuffles.
//   y[i] = sum_k x[i,k] w_sum[k] + b_sum
// Who owns what: a block of 512 threads owns 4 rows; a thread takes 4 neighbouring k of each row at
//   once, so that it reads w_sum[k] once for 4 rows and has 4 independent 16-byte loads in flight.
// Moves: x once, 4 B K bytes; w_sum 8 K bytes for every 4 rows, from L1 or L2.
// Assumes: rows that can be read by 16 bytes; the launcher sends others to one float at a time.
// Against rung 3: a quarter of the load instructions, one barrier a row instead of eight.
#include "load.cuh"
#include "problem.h"
#include "reduce.cuh"

constexpr int kThreads = 512, kRows = 4;

template <int Width>  // floats a load: 4 where the alignment allows it, else 1
__global__ void __launch_bounds__(kThreads) dot_rows_in_flight_kernel(SumChain p) {
  __shared__ double scratch[kRows][kThreads / kWarp];
  const int64_t first = blockIdx.x * static_cast<int64_t>(kRows);
  double sum[kRows] = {};
  for (int64_t k = threadIdx.x * Width; k < p.K; k += kThreads * Width) {
    float v[kRows][Width];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      load_once<Width>(v[r], p.x + (first + r) * p.x_stride + k, first + r < p.B);
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] = dot<Width>(v[r], p.w_sum + k, sum[r]);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const double total = block_sum<kThreads>(sum[r], scratch[r]);
    if (threadIdx.x == 0 && first + r < p.B) p.y[first + r] = static_cast<float>(total + *p.b_sum);
  }
}

cudaError_t launch(const SumChain& p, cudaStream_t stream) {
  const int64_t blocks = (p.B + kRows - 1) / kRows;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  auto kernel = rows_are_float4(p.x, p.x_stride, p.K) ? dot_rows_in_flight_kernel<4>
                                                      : dot_rows_in_flight_kernel<1>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
