// Exponents of columns and of rows, from samples of V.
// Who owns what: of columns, a block owns 128 of them, its warps some rows each; of rows, 32 lanes own some,
//   or 8 of short ones, each in some columns. Both wait for memory.
#pragma once
#include "dependent_launch.cuh"
#include "reduce.cuh"
#include "sources.cuh"

constexpr int kSampled = 128;    // rows of W in which columns' exponents are looked for, or eight of V
constexpr int kSampleTop = 10;   // exponent of the largest that a row's sample has, split
constexpr int kNothing = -1000;  // exponent of a row whose sample is zeros: any other number exceeds it
constexpr int kSampleThreads = 1024;  // a warp for every sampled row of columns, or a few

// Of a row of V 256 columns are sampled, by 32 lanes at kPieces places; of a shorter one 64, by 8.
template <int Width>
constexpr int kPieces = 8 / Width;
constexpr int kLongRow = 4096;

// The exponent above `most`, that of the largest number: within [-126, 126], so that powers of two are
// ordinary numbers.
__device__ __forceinline__ int above(int most) {
  return most == kNoExponent ? -126 : min(max(most + 1, -126), 126);
}

template <template <int> class Source, int Width>
__global__ void __launch_bounds__(kSampleThreads)
    column_exponents_kernel(const __grid_constant__ SplitWeights p) {
  using Rows = Source<Width>;
  constexpr int kWarps = kSampleThreads / kWarp;
  __shared__ int scratch[kWarps][kWarp * Width];
  wait_for_previous();
  let_next_begin();  // it may ask for its rows meanwhile
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t first = blockIdx.x * kColumnsOfBlock<Width>, k = first + lane * Width;
  const int64_t sampled = max(int64_t{8}, kSampled / p.group), step = (p.rows + sampled - 1) / sampled;
  int top[Width];
  for (int j = 0; j < Width; ++j) top[j] = kNoExponent;
  Rows source;
  for (int64_t row = warp * step; row < p.rows && k < p.K; row += kWarps * Rows::kAtOnce * step) {
    typename Rows::Number v[Rows::kAtOnce][Width];
    typename Rows::Asked asked;
    source.ask(asked, p, row, kWarps * step, p.rows, k);
    source.make(v, asked);
#pragma unroll
    for (int u = 0; u < Rows::kAtOnce; ++u)
#pragma unroll
      for (int j = 0; j < Width; ++j) top[j] = max(top[j], exponent_of(v[u][j]));
  }
  for (int j = 0; j < Width; ++j) scratch[warp][lane * Width + j] = top[j];
  __syncthreads();
  const int at = threadIdx.x;
  if (at < kWarp * Width && first + at < p.width) {
    int most = kNoExponent;
    for (int w = 0; w < kWarps; ++w) most = max(most, scratch[w][at]);
    if (first + at < p.K) p.most[first + at] = most;
    p.c[first + at] = static_cast<int8_t>(first + at < p.K ? above(most) : 0);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) p.most[p.K] = 0;
}

// Lanes have kAtOnce rows. These may be asked for before the columns' exponents are there: what was
// before that launch has ended. (Of means they are; other loads the compiler moves behind the wait.)
template <template <int> class Source, int Width, int Lanes>
__global__ void __launch_bounds__(kColumnThreads)
    row_exponents_kernel(const __grid_constant__ SplitWeights p) {
  using Rows = Source<Width>;
  constexpr int kAtOnce = Rows::kAtOnce, kTeams = kColumnThreads / Lanes;
  const int team = threadIdx.x / Lanes, lane = threadIdx.x % Lanes;
  const int64_t row = (blockIdx.x * int64_t{kTeams} + team) * kAtOnce;
  const int64_t apart = max(int64_t{Lanes * Width}, p.K / kPieces<Width> / 4 * 4);
  Rows source;
  typename Rows::Number v[kPieces<Width>][kAtOnce][Width];
#pragma unroll
  for (int piece = 0; piece < kPieces<Width>; ++piece) {
    const int64_t k = piece * apart + lane * Width;
    typename Rows::Asked asked;
    source.ask(asked, p, row, 1, k < p.K ? p.rows : 0, k);
    source.make(v[piece], asked);
  }
  wait_for_previous();
  int top[kAtOnce];
  for (int u = 0; u < kAtOnce; ++u) top[u] = kNoExponent;
#pragma unroll
  for (int piece = 0; piece < kPieces<Width>; ++piece) {
    const int64_t k = piece * apart + lane * Width;
    int c[Width] = {};
    if (k < p.K) take<Width>(c, p.c + k);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
#pragma unroll
      for (int j = 0; j < Width; ++j)
        if (const int exponent = exponent_of(v[piece][u][j]); exponent != kNoExponent)
          top[u] = max(top[u], exponent - c[j]);
  }
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
#pragma unroll
    for (int apart = Lanes / 2; apart > 0; apart /= 2)
      top[u] = max(top[u], __shfl_xor_sync(kFullWarp, top[u], apart));
    if (lane == 0 && row + u < p.rows)
      p.e[row + u] = top[u] == kNoExponent ? kNothing : top[u] - kSampleTop;
  }
}
