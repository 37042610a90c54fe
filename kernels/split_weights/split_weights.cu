// Splitting weights in halves while they are read, and folded.
// Who owns what: a block owns 32 lanes of 4 columns in a slice of V's rows, its 8 warps some rows
//   by turns. Before, exponents (samples.cuh). Behind, a block adds sums of slices, of 8 columns at a time;
//   then it owns a row at a time: it returns at once, or splits again.
// Moves: W once, and a hundredth or so for the samples; as many bytes of halves as V has in float.
#include "halves.cuh"
#include "samples.cuh"
#include "split_weights.h"

constexpr int kBeyond = 6;       // a column's numbers may exceed their sample by 2^kBeyond
constexpr int kSplitBlocks = 3;  // of a processor, at least: registers for what is in flight
constexpr int kAgainThreads = 256, kAgainBlocks = 1024;

// Of the rows and columns of a thread: notes the exponents that exceed their columns'. By an integer
// maximum, which no order changes.
template <template <int> class Source, int Width>
__device__ __noinline__ void note_beyond(const SplitWeights& p, int64_t first, int64_t end,
                                         int64_t k) {
  using Rows = Source<Width>;
  constexpr int kStep = kColumnWarps * Rows::kAtOnce;
  for (int64_t row = first; row < end; row += kStep)
    for (int64_t r = row; r < end && r < row + Rows::kAtOnce; ++r) {
      Rows source;
      typename Rows::Number v[Rows::kAtOnce][Width];
      typename Rows::Asked asked;
      source.ask(asked, p, r, 1, r + 1, k);
      source.make(v, asked);
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
__global__ void __launch_bounds__(kColumnThreads, kSplitBlocks)
    split_weights_kernel(const __grid_constant__ SplitWeights p) {
  using Rows = Source<Width>;
  using T = typename Rows::Number;
  constexpr T kMostOfRow = 1 << (kTop + 1);
  wait_for_previous();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t first = blockIdx.x * kColumnsOfBlock<Width>, k = first + lane * Width;
  // rows and a step beyond fit in an int: the launcher has looked
  const int slices = static_cast<int>(p.slices);
  const int each = ((static_cast<int>(p.rows) + slices - 1) / slices + 7) / 8 * 8;
  const int begin = static_cast<int>(blockIdx.y) * each;
  const int end = min(begin + each, static_cast<int>(p.rows));
  const bool inside = k < p.K;
  int c[Width] = {};
  if (inside) take<Width>(c, p.c + k);
  T most[Width];  // of a column's numbers; 2^128 is infinity
#pragma unroll
  for (int j = 0; j < Width; ++j) most[j] = power_of_two<T>(min(c[j] + kBeyond, 128));
  bool within = true;
  constexpr int kStep = kColumnWarps * Rows::kAtOnce;
  Rows source;
  typename Rows::Asked asked;
  int e[Rows::kAtOnce];
  const auto ask = [&](int row) {
    source.ask(asked, p, row, 1, inside ? end : 0, k);
#pragma unroll
    for (int u = 0; u < Rows::kAtOnce; ++u) e[u] = row + u < end ? __ldg(p.e + row + u) : 0;
  };
  // rows of a warp at a time are neighbours, two of which fill a line of halves
  const int first_row = begin + warp * Rows::kAtOnce;
  ask(first_row);
  for (int row = first_row; row < end && k < p.width; row += kStep) {
    T v[Rows::kAtOnce][Width];
    int of[Rows::kAtOnce];
    source.make(v, asked);
#pragma unroll
    for (int u = 0; u < Rows::kAtOnce; ++u) of[u] = e[u];
    ask(row + kStep);  // in flight meanwhile
#pragma unroll
    for (int u = 0; u < Rows::kAtOnce; ++u) {
      const int r = row + u;
      if (r >= end) break;
      if (inside) source.give(p, r, k, v[u]);
      int s[Width];
#pragma unroll
      for (int j = 0; j < Width; ++j) s[j] = -c[j] - of[u];
#pragma unroll
      for (int j = 0; j < Width; ++j) within &= fabs(v[u][j]) < most[j];  // NaN is not
      scale<Width>(v[u], s);
#pragma unroll
      for (int j = 0; j < Width; ++j) within &= fabs(v[u][j]) < kMostOfRow;
      give_halves<Width>(p.hi, p.lo, place(static_cast<int>(p.rows), r, k), v[u]);
    }
  }
  if (!within) note_beyond<Source, Width>(p, first_row, end, k);
  source.finish(p, first);
}

// s <- the sums of the slices, in a fixed order: lanes of 8 columns add every 32nd of them.
__device__ __forceinline__ void add_slices(const SplitWeights& p) {
  constexpr int kColumns = 8, kTeams = kAgainThreads / kColumns, kWarps = kAgainThreads / kWarp;
  __shared__ double scratch[kWarps][kColumns];
  const int column = threadIdx.x % kColumns, team = threadIdx.x / kColumns;
  for (int64_t first = blockIdx.x * int64_t{kColumns}; first < p.K;
       first += gridDim.x * int64_t{kColumns}) {
    const int64_t k = first + column;
    double sum = 0;
#pragma unroll 8
    for (int64_t slice = team; slice < p.slices; slice += kTeams)
      sum += k < p.K ? p.partial[slice * p.K + k] : 0.0;
#pragma unroll
    for (int apart = kColumns; apart < kWarp; apart *= 2)
      sum += __shfl_xor_sync(kFullWarp, sum, apart);
    if (threadIdx.x % kWarp < kColumns) scratch[threadIdx.x / kWarp][column] = sum;
    __syncthreads();
    for (int w = 1; w < kWarps && threadIdx.x < kColumns; ++w) sum += scratch[w][column];
    if (threadIdx.x < kColumns && k < p.K) p.s[k] = sum;
    __syncthreads();  // before the next columns
  }
}

template <template <int> class Source, int Width>
__global__ void __launch_bounds__(kAgainThreads, kColumnBlocks)
    split_again_kernel(const __grid_constant__ SplitWeights p) {
  using Rows = Source<Width>;
  wait_for_previous();
  const bool again = p.most[p.K] != 0;
  if (p.fold == kDifference) add_slices(p);
  if (!again) return;
  __shared__ int scratch[kAgainThreads / kWarp];
  const int start = threadIdx.x * Width, lane = threadIdx.x % kWarp;
  for (int64_t k = threadIdx.x; blockIdx.x == 0 && k < p.K; k += kAgainThreads)
    p.c[k] = static_cast<int8_t>(above(p.most[k]));
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    Rows source;
    typename Rows::Number v[Rows::kAtOnce][Width];
    typename Rows::Asked asked;
    int top = kNoExponent, finite = 1;
    for (int64_t k = start; k < p.K; k += kAgainThreads * Width) {
      source.ask(asked, p, row, 1, row + 1, k);
      source.make(v, asked);
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
      source.ask(asked, p, row, 1, row + 1, k);
      source.make(v, asked);
      int s[Width];
      for (int j = 0; j < Width; ++j) s[j] = -above(p.most[k + j]) - e;
      scale<Width>(v[0], s);
      give_halves<Width>(p.hi, p.lo, place(static_cast<int>(p.rows), static_cast<int>(row), k), v[0]);
    }
    __syncthreads();  // before scratch is written for the next row
  }
}

template <template <int> class Source, int Width, int Lanes>
static cudaError_t launch_source(const SplitWeights& p, cudaStream_t stream) {
  const int64_t across = (p.width + kColumnsOfBlock<Width> - 1) / kColumnsOfBlock<Width>;
  constexpr int kRowsOfBlock = kColumnThreads / Lanes * Source<Width>::kAtOnce;
  const int64_t down = (p.rows + kRowsOfBlock - 1) / kRowsOfBlock;
  constexpr int64_t kMost = INT32_MAX - (1 << 20);  // rows, a slice and a step beyond are int
  if (across > INT32_MAX || p.rows > kMost || p.slices > 4096)
    return cudaErrorInvalidConfiguration;
  const dim3 columns(static_cast<unsigned>(across)), rows(static_cast<unsigned>(down));
  const dim3 tiles(columns.x, static_cast<unsigned>(p.slices));
  const dim3 again(static_cast<unsigned>(min(p.rows, int64_t{kAgainBlocks})));
  const auto launch = [&](auto kernel, dim3 grid, int threads) {
    return launch_dependent(kernel, grid, threads, 0, stream, p);
  };
  for (const cudaError_t error :
       {launch(column_exponents_kernel<Source, Width>, columns, kSampleThreads),
        launch(row_exponents_kernel<Source, Width, Lanes>, rows, kColumnThreads),
        launch(split_weights_kernel<Source, Width>, tiles, kColumnThreads),
        launch(split_again_kernel<Source, Width>, again, kAgainThreads)})
    if (error != cudaSuccess) return error;
  return cudaSuccess;
}

template <template <int> class Source, int Width>
static cudaError_t launch_lanes(const SplitWeights& p, cudaStream_t stream) {
  return p.K < kLongRow ? launch_source<Source, Width, 8>(p, stream)
                        : launch_source<Source, Width, kWarp>(p, stream);
}

template <int Width>
static cudaError_t launch_width(const SplitWeights& p, cudaStream_t stream) {
  switch (p.fold) {
    case kDifference: return launch_lanes<Differences, Width>(p, stream);
    case kMean: return launch_lanes<Means, Width>(p, stream);
    default: return launch_lanes<WholeRows, Width>(p, stream);
  }
}

// Of no rows: columns' exponents and sums are 0.
static cudaError_t launch_nothing(const SplitWeights& p, cudaStream_t stream) {
  cudaError_t error = cudaMemsetAsync(p.c, 0, p.width, stream);
  if (error != cudaSuccess || p.fold != kDifference) return error;
  error = cudaMemsetAsync(p.total, 0, sizeof(double), stream);
  return error != cudaSuccess ? error : cudaMemsetAsync(p.s, 0, p.K * sizeof(double), stream);
}

cudaError_t launch(const SplitWeights& p, cudaStream_t stream) {
  if (p.rows == 0) return launch_nothing(p, stream);
  return rows_are_float4(p.W, p.stride, p.K) ? launch_width<4>(p, stream)
                                             : launch_width<1>(p, stream);
}
