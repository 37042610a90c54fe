// Splitting the rows of an input in halves.
// Who owns what: a block owns a row. Its threads hold up to 16 floats each, or 32 of a long row without
//   a centre: they walk the row for its exponent, and again to split it, from registers, or from L1, L2
//   and memory where it is longer.
// Moves: x once, and as many bytes of halves as float32 has; half of these without lo.
#include "dependent_launch.cuh"
#include "halves.cuh"
#include "reduce.cuh"
#include "split_rows.h"

constexpr int kResident = 1024;  // threads of a multiprocessor, at least: 64 registers each

// The exponent of the row, by all of a block.
template <int Threads>
__device__ __forceinline__ int exponent_of_row(int top) {
  __shared__ int scratch[Threads / kWarp];
  top = __reduce_max_sync(kFullWarp, top);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = top;
  __syncthreads();
  top = __reduce_max_sync(kFullWarp, scratch[threadIdx.x % (Threads / kWarp)]);
  return top == kNoExponent ? 0 : top - kTop;
}

// Width numbers of the row, or half of their distance from the centre where there is one: the half of a
// difference is finite where both are, and the factor exact.
template <int Width>
__device__ __forceinline__ void take_centred(float (&v)[Width], const float* row,
                                             const SplitRows& p, int k) {
  take<Width>(v, row + k);
  if (p.centre == nullptr) return;
  float centre[Width];
  take<Width>(centre, p.centre + k);
#pragma unroll
  for (int j = 0; j < Width; ++j) v[j] = fmaf(0.5f, v[j], -0.5f * centre[j]);
}

template <int Threads, int Floats, int Width>
__global__ void __launch_bounds__(Threads, kResident / Threads) split_rows_kernel(SplitRows p) {
  wait_for_previous();
  constexpr int kHeld = Floats / Width;  // loads of a thread that stay
  constexpr int kStep = Threads * Width, kAtOnce = kStep * kHeld;
  const float* row = p.x + blockIdx.x * p.x_stride;
  const int K = static_cast<int>(p.K), rows = static_cast<int>(p.rows), start = threadIdx.x * Width;
  const int end = (K + 2 * kPanel - 1) / (2 * kPanel) * (2 * kPanel);
  constexpr bool kWhole = Floats > 16;  // launched for K <= kAtOnce, no centre: registers
  const bool held = kWhole || K <= kAtOnce;
  float values[kHeld][Width];
  const auto load = [&](int first) {
#pragma unroll
    for (int u = 0; u < kHeld; ++u)
      if (const int k = first + u * kStep; k < K) {
        if constexpr (kWhole)
          take<Width>(values[u], row + k);
        else
          take_centred<Width>(values[u], row, p, k);
      }
  };
  int top = kNoExponent;
  for (int first = start; first < K; first += kAtOnce) {
    load(first);
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      const int k = first + u * kStep;
      if (k >= K) continue;
      int c[Width];
      take<Width>(c, p.c + k);
#pragma unroll
      for (int j = 0; j < Width; ++j)
        if (const int exponent = exponent_of(values[u][j]); exponent != kNoExponent)
          top = max(top, exponent + c[j]);
    }
  }
  const int e = exponent_of_row<Threads>(top);
  if (threadIdx.x == 0) p.e[blockIdx.x] = e;
  for (int first = start; first < end; first += kAtOnce) {
    if (!held) load(first);
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      const int k = first + u * kStep;
      if (k >= end) continue;
      int s[Width] = {};
      if (k < K) take<Width>(s, p.c + k);
#pragma unroll
      for (int j = 0; j < Width; ++j) {
        s[j] -= e;
        if (k >= K) values[u][j] = 0.f;
      }
      scale<Width>(values[u], s);
      give_halves<Width>(p.hi, p.lo, place(rows, blockIdx.x, k), values[u]);
    }
  }
}

template <int Threads, int Floats, int Width>
static cudaError_t launch_team(const SplitRows& p, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(p.rows);
  return launch_dependent(split_rows_kernel<Threads, Floats, Width>, blocks, Threads, 0, stream, p);
}

cudaError_t launch(const SplitRows& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  // the grid's limit in x; indices within a row, and a step beyond, are int
  if (p.rows > INT32_MAX || p.K > INT32_MAX - (1 << 20)) return cudaErrorInvalidConfiguration;
  const bool wide = by_four(p.x, p.x_stride, p.K, 4) && by_four(p.c, 4, 4, 1) &&
                    by_four(p.centre, 4, 4, 4);
  if (!wide) return launch_team<256, 16, 1>(p, stream);
  if (p.K > 1024 * 16 && p.K <= 1024 * 32 && p.centre == nullptr)
    return launch_team<1024, 32, 4>(p, stream);
  if (p.K > 8192) return launch_team<1024, 16, 4>(p, stream);
  return p.K > 2048 ? launch_team<512, 16, 4>(p, stream) : launch_team<128, 16, 4>(p, stream);
}
