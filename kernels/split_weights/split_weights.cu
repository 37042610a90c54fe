// Splitting weights in halves while they are read, and folded.
// Who owns what: a block owns 32 lanes of 4 columns in a slice of V's rows, its 8 warps every 8th row
//   (columns.cuh). Before, exponents: of columns, a block 128 of them in some rows; of rows, some
//   warps one of them, each in some columns. Behind, a block owns a row at a time: it returns at once, or
//   splits again.
// Moves: W once, and a hundredth or so for the samples; as many bytes of halves as V has in float.
#include "halves.cuh"
#include "reduce.cuh"
#include "sources.cuh"
#include "split_weights.h"

constexpr int kSampled = 128;    // rows of W in which columns' exponents are looked for, or eight of V
constexpr int kSampleTop = 10;   // exponent of the largest that a row's sample has, split
constexpr int kBeyond = 6;       // a column's numbers may exceed their sample by 2^kBeyond
constexpr int kNothing = -1000;  // exponent of a row whose sample is zeros: any other number exceeds it
constexpr int kAgainThreads = 256, kAgainBlocks = 1024;

// Warps that sample a row of V, 256 columns in all.
template <int Width>
constexpr int kPiecesOfRow = 256 / (kWarp * Width);

// The exponent above `most`, that of the largest number: within [-126, 126], so that powers of two are
// ordinary numbers.
__device__ __forceinline__ int above(int most) {
  return most == kNoExponent ? -126 : min(max(most + 1, -126), 126);
}

template <template <int> class Source, int Width>
__global__ void __launch_bounds__(kColumnThreads)
    column_exponents_kernel(const __grid_constant__ SplitWeights p) {
  using Rows = Source<Width>;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t first = blockIdx.x * kColumnsOfBlock<Width>, k = first + lane * Width;
  const int64_t sampled = max(int64_t{8}, kSampled / p.group), step = (p.rows + sampled - 1) / sampled;
  int top[Width];
  for (int j = 0; j < Width; ++j) top[j] = kNoExponent;
  Rows source;
  for (int64_t row = warp * step; row < p.rows && k < p.K;
       row += kColumnWarps * Rows::kAtOnce * step) {
    typename Rows::Number v[Rows::kAtOnce][Width];
    source.take(v, p, row, kColumnWarps * step, p.rows, k);
#pragma unroll
    for (int u = 0; u < Rows::kAtOnce; ++u)
#pragma unroll
      for (int j = 0; j < Width; ++j) top[j] = max(top[j], exponent_of(v[u][j]));
  }
  __shared__ int scratch[kColumnWarps][kWarp * Width];
  for (int j = 0; j < Width; ++j) scratch[warp][lane * Width + j] = top[j];
  __syncthreads();
  for (int at = threadIdx.x; at < kWarp * Width && first + at < p.width; at += kColumnThreads) {
    int most = kNoExponent;
    for (int w = 0; w < kColumnWarps; ++w) most = max(most, scratch[w][at]);
    if (first + at < p.K) p.most[first + at] = most;
    p.c[first + at] = static_cast<int8_t>(first + at < p.K ? above(most) : 0);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) p.most[p.K] = 0;
}

template <template <int> class Source, int Width>
__global__ void __launch_bounds__(kColumnThreads)
    row_exponents_kernel(const __grid_constant__ SplitWeights p) {
  using Rows = Source<Width>;
  constexpr int kPieces = kPiecesOfRow<Width>, kSpan = kWarp * Width;
  __shared__ int scratch[kColumnWarps];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t row = blockIdx.x * int64_t{kColumnWarps / kPieces} + warp / kPieces;
  const int64_t apart = max(int64_t{kSpan}, p.K / kPieces / 4 * 4);
  const int64_t k = warp % kPieces * apart + lane * Width;
  int top = kNoExponent;
  if (row < p.rows && k < p.K) {
    Rows source;
    typename Rows::Number v[Rows::kAtOnce][Width];
    source.take(v, p, row, 1, row + 1, k);
    int c[Width];
    take<Width>(c, p.c + k);
#pragma unroll
    for (int j = 0; j < Width; ++j)
      if (const int exponent = exponent_of(v[0][j]); exponent != kNoExponent)
        top = max(top, exponent - c[j]);
  }
  scratch[warp] = __reduce_max_sync(kFullWarp, top);
  __syncthreads();
  if (warp % kPieces != 0 || lane != 0 || row >= p.rows) return;
  for (int piece = 0; piece < kPieces; ++piece) top = max(top, scratch[warp + piece]);
  p.e[row] = top == kNoExponent ? kNothing : top - kSampleTop;
}

// Of the columns of a thread: notes the exponents that exceed their columns'. By an integer maximum,
// which no order changes.
template <template <int> class Source, int Width>
__device__ __noinline__ void note_beyond(const SplitWeights& p, int64_t begin, int64_t end,
                                         int64_t k) {
  using Rows = Source<Width>;
  for (int64_t row = begin; row < end; row += kColumnWarps) {
    Rows source;
    typename Rows::Number v[Rows::kAtOnce][Width];
    source.take(v, p, row, 1, row + 1, k);
    for (int j = 0; j < Width; ++j) {
      const int exponent = exponent_of(v[0][j]);
      if (exponent == kNoExponent || exponent - p.c[k + j] < kBeyond) continue;
      if (*const_cast<volatile int*>(p.most + k + j) < exponent)
        atomicMax(p.most + k + j, exponent);
    }
  }
  p.most[p.K] = 1;
}

template <template <int> class Source, int Width>
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks)
    split_weights_kernel(const __grid_constant__ SplitWeights p) {
  using Rows = Source<Width>;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t first = blockIdx.x * kColumnsOfBlock<Width>, k = first + lane * Width;
  const int64_t each = (p.rows + p.slices - 1) / p.slices, begin = blockIdx.y * each + warp;
  const int64_t end = min(blockIdx.y * each + each, p.rows);
  const bool inside = k < p.K;
  int c[Width] = {};
  if (inside) take<Width>(c, p.c + k);
  bool beyond = false;
  Rows source;
  for (int64_t row = begin; row < end && k < p.width; row += kColumnWarps * Rows::kAtOnce) {
    typename Rows::Number v[Rows::kAtOnce][Width];
    source.take(v, p, row, kColumnWarps, inside ? end : 0, k);
#pragma unroll
    for (int u = 0; u < Rows::kAtOnce; ++u) {
      const int64_t r = row + u * kColumnWarps;
      if (r >= end) break;
      const int e = p.e[r];
      int s[Width];
#pragma unroll
      for (int j = 0; j < Width; ++j) {
        s[j] = -c[j] - e;
        const int exponent = exponent_of(v[u][j]), most = min(kBeyond - 1, kTop + e);
        beyond |= (exponent != kNoExponent && exponent - c[j] > most) || v[u][j] - v[u][j] != 0;
      }
      give_halves<Width>(p.hi, p.lo, place(static_cast<int>(p.rows), static_cast<int>(r), k), v[u],
                         s);
      if (inside) source.give(p, r, k, v[u]);
    }
  }
  if (beyond) note_beyond<Source, Width>(p, begin, end, k);
  source.finish(p, first);
}

template <template <int> class Source, int Width>
__global__ void __launch_bounds__(kAgainThreads)
    split_again_kernel(const __grid_constant__ SplitWeights p) {
  using Rows = Source<Width>;
  if (p.most[p.K] == 0) return;
  __shared__ int scratch[kAgainThreads / kWarp];
  const int start = threadIdx.x * Width, lane = threadIdx.x % kWarp;
  for (int64_t k = threadIdx.x; blockIdx.x == 0 && k < p.K; k += kAgainThreads)
    p.c[k] = static_cast<int8_t>(above(p.most[k]));
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    Rows source;
    typename Rows::Number v[Rows::kAtOnce][Width];
    int top = kNoExponent, finite = 1;
    for (int64_t k = start; k < p.K; k += kAgainThreads * Width) {
      source.take(v, p, row, 1, row + 1, k);
      for (int j = 0; j < Width; ++j) {
        const int exponent = exponent_of(v[0][j]);
        finite &= v[0][j] - v[0][j] == 0;
        if (exponent != kNoExponent) top = max(top, exponent - above(p.most[k + j]));
      }
    }
    top = __reduce_max_sync(kFullWarp, top);
    if (lane == 0) scratch[threadIdx.x / kWarp] = top;
    finite = __syncthreads_and(finite);
    top = __reduce_max_sync(kFullWarp, scratch[lane % (kAgainThreads / kWarp)]);
    const int e = top == kNoExponent ? 0 : top - kTop;
    if (threadIdx.x == 0) p.e[row] = finite ? e : kNotFinite;
    for (int64_t k = start; k < p.K; k += kAgainThreads * Width) {
      source.take(v, p, row, 1, row + 1, k);
      int s[Width];
      for (int j = 0; j < Width; ++j) s[j] = -above(p.most[k + j]) - e;
      give_halves<Width>(p.hi, p.lo, place(static_cast<int>(p.rows), static_cast<int>(row), k),
                         v[0], s);
    }
    __syncthreads();  // before scratch is written for the next row
  }
}

template <template <int> class Source, int Width>
static cudaError_t launch_source(const SplitWeights& p, cudaStream_t stream) {
  const int64_t across = (p.width + kColumnsOfBlock<Width> - 1) / kColumnsOfBlock<Width>;
  constexpr int kRowsOfBlock = kColumnWarps / kPiecesOfRow<Width>;
  const int64_t down = (p.rows + kRowsOfBlock - 1) / kRowsOfBlock;
  if (across > INT32_MAX || p.rows > INT32_MAX || p.slices > 65535)
    return cudaErrorInvalidConfiguration;
  const dim3 columns(static_cast<unsigned>(across)), rows(static_cast<unsigned>(down));
  const dim3 tiles(columns.x, static_cast<unsigned>(p.slices));
  const dim3 again(static_cast<unsigned>(min(p.rows, int64_t{kAgainBlocks})));
  column_exponents_kernel<Source, Width><<<columns, kColumnThreads, 0, stream>>>(p);
  row_exponents_kernel<Source, Width><<<rows, kColumnThreads, 0, stream>>>(p);
  split_weights_kernel<Source, Width><<<tiles, kColumnThreads, 0, stream>>>(p);
  split_again_kernel<Source, Width><<<again, kAgainThreads, 0, stream>>>(p);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  return p.fold == kDifference ? launch_sums(p.partial, p.s, p.slices, p.K, stream) : cudaSuccess;
}

template <int Width>
static cudaError_t launch_width(const SplitWeights& p, cudaStream_t stream) {
  switch (p.fold) {
    case kDifference: return launch_source<Differences, Width>(p, stream);
    case kMean: return launch_source<Means, Width>(p, stream);
    default: return launch_source<WholeRows, Width>(p, stream);
  }
}

// Of no rows: columns' exponents and sums are 0.
static cudaError_t launch_nothing(const SplitWeights& p, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(p.c, 0, p.width, stream);
  if (error != cudaSuccess || p.fold != kDifference) return error;
  return cudaMemsetAsync(p.s, 0, p.K * sizeof(double), stream);
}

cudaError_t launch(const SplitWeights& p, cudaStream_t stream) {
  if (p.rows == 0) return launch_nothing(p, stream);
  return rows_are_float4(p.W, p.stride, p.K) ? launch_width<4>(p, stream)
                                             : launch_width<1>(p, stream);
}
