// Exponents of the columns of a matrix, once for weights.
// Who owns what: a block owns 32 lanes of 4 columns in 256 rows, its 8 warps every 8th row; the
//   largest of all blocks is kept by an integer maximum, which no order changes.
// Moves: v once.
#include "column_exponents.h"
#include "exponent.cuh"
#include "reduce.cuh"
#include "vector.cuh"

constexpr int kThreads = 256, kWarps = kThreads / kWarp, kRowsOfABlock = 256;
constexpr int kFound = 1 << 16;  // added: 0 means that no exponent was found

template <int Width, class T>
__global__ void __launch_bounds__(kThreads) column_exponents_kernel(ColumnExponents p) {
  const T* v = static_cast<const T*>(p.v);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t k = (blockIdx.x * static_cast<int64_t>(kWarp) + lane) * Width;
  const int64_t begin = blockIdx.y * static_cast<int64_t>(kRowsOfABlock);
  const int64_t end = min(begin + kRowsOfABlock, p.rows);
  int top[Width];
  for (int j = 0; j < Width; ++j) top[j] = kNoExponent;
#pragma unroll 4
  for (int64_t i = begin + warp; i < end && k < p.K; i += kWarps) {
    T values[Width];
    take<Width>(values, v + i * p.v_stride + k);
#pragma unroll
    for (int j = 0; j < Width; ++j) top[j] = max(top[j], exponent_of(values[j]));
  }
  __shared__ int scratch[kWarps][kWarp * Width];
  for (int j = 0; j < Width; ++j) scratch[warp][lane * Width + j] = top[j];
  __syncthreads();
  for (int at = threadIdx.x; at < kWarp * Width; at += kThreads) {
    int most = kNoExponent;
    for (int w = 0; w < kWarps; ++w) most = max(most, scratch[w][at]);
    const int64_t column = blockIdx.x * static_cast<int64_t>(kWarp * Width) + at;
    if (column < p.K && most != kNoExponent) atomicMax(p.most + column, most + kFound);
  }
}

__global__ void __launch_bounds__(kThreads) clamped_exponents_kernel(ColumnExponents p) {
  const int64_t k = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (k >= p.K) return;
  const int above = p.most[k] - kFound + 1;
  p.c[k] = static_cast<int8_t>(p.most[k] == 0 ? 0 : min(max(above, -126), 126));
}

template <int Width, class T>
static cudaError_t launch_columns(const ColumnExponents& p, cudaStream_t stream) {
  const int64_t across = (p.K + kWarp * Width - 1) / (kWarp * Width);
  const int64_t down = (p.rows + kRowsOfABlock - 1) / kRowsOfABlock;
  if (across > INT32_MAX || down > 65535) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>(down));
  column_exponents_kernel<Width, T><<<grid, kThreads, 0, stream>>>(p);
  const unsigned blocks = static_cast<unsigned>((p.K + kThreads - 1) / kThreads);
  clamped_exponents_kernel<<<blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch(const ColumnExponents& p, cudaStream_t stream) {
  const bool wide = by_four(p.v, p.v_stride, p.K, p.is_double ? 8 : 4);
  if (p.is_double)
    return wide ? launch_columns<4, double>(p, stream) : launch_columns<1, double>(p, stream);
  return wide ? launch_columns<4, float>(p, stream) : launch_columns<1, float>(p, stream);
}
