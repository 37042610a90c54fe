// Splitting the rows of a matrix in halves.
// Who owns what: a block owns a row. Its threads hold up to 16 floats each, or 32 of a long row without
//   a centre: they walk the row for its exponent, and again to split it, from registers, or from L1, L2
//   and memory where it is longer.
// Moves: v once, and as many bytes of halves as float32 has; half of these without lo.
#include "exponent.cuh"
#include "reduce.cuh"
#include "split_rows.h"
#include "vector.cuh"

constexpr int kPanel = 32;  // columns of a panel
constexpr int kResident = 1024;  // threads of a multiprocessor, at least: 64 registers each
constexpr int kTop = 14;    // exponent of the row's largest, split

// Where (row, k) stands.
__device__ __forceinline__ int64_t place(int rows, int row, unsigned k) {
  const unsigned chunk = (k % kPanel / 8) ^ (row / 2 % 4);
  return (k / kPanel * int64_t{(rows + 7) / 8 * 8} + row) * kPanel + chunk * 8 + k % 8;
}

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

// Width numbers of the row; of float, half of their distance from the centre where there is one: the
// half of a difference is finite where both are, and the factor exact.
template <int Width, class T>
__device__ __forceinline__ void take_centred(T (&v)[Width], const T* row, const SplitRows& p,
                                             int k) {
  take<Width>(v, row + k);
  if constexpr (sizeof(T) == 4)
    if (p.centre != nullptr) {
      float centre[Width];
      take<Width>(centre, p.centre + k);
#pragma unroll
      for (int j = 0; j < Width; ++j) v[j] = fmaf(0.5f, v[j], -0.5f * centre[j]);
    }
}

template <int Threads, int Floats, int Width, class T>
__global__ void __launch_bounds__(Threads, kResident / Threads) split_rows_kernel(SplitRows p) {
  constexpr int kHeld = Floats / Width / (sizeof(T) / 4);  // loads of a thread that stay
  constexpr int kStep = Threads * Width, kAtOnce = kStep * kHeld;
  const T* row = static_cast<const T*>(p.v) + blockIdx.x * p.v_stride;
  const int K = static_cast<int>(p.K), rows = static_cast<int>(p.rows), start = threadIdx.x * Width;
  const int end = (K + 2 * kPanel - 1) / (2 * kPanel) * (2 * kPanel);
  const int sign = p.divide ? -1 : 1;
  constexpr bool kWhole = Floats > 16;  // launched for K <= kAtOnce, no centre: registers
  const bool held = kWhole || K <= kAtOnce;
  T values[kHeld][Width];
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
  int top = kNoExponent, finite = 1;
  for (int first = start; first < K; first += kAtOnce) {
    load(first);
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      const int k = first + u * kStep;
      if (k >= K) continue;
      int c[Width];
      take<Width>(c, p.c + k);
#pragma unroll
      for (int j = 0; j < Width; ++j) {
        const int exponent = exponent_of(values[u][j]);
        finite &= values[u][j] - values[u][j] == 0;
        if (exponent != kNoExponent) top = max(top, exponent + sign * c[j]);
      }
    }
  }
  const int e = exponent_of_row<Threads>(top);
  finite = __syncthreads_and(finite);
  if (threadIdx.x == 0) p.e[blockIdx.x] = p.divide && !finite ? kNotFinite : e;
  for (int first = start; first < end; first += kAtOnce) {
    if (!held) load(first);
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      const int k = first + u * kStep;
      if (k >= end) continue;
      int c[Width] = {};
      if (k < K) take<Width>(c, p.c + k);
      alignas(8) half hi[Width], lo[Width];
#pragma unroll
      for (int j = 0; j < Width; ++j) {
        const T scaled = k < K ? raised(values[u][j], sign * c[j] - e) : T(0);
        hi[j] = __float2half_rn(static_cast<float>(scaled));
        const T rest = scaled - static_cast<T>(__half2float(hi[j]));  // NaN where hi is infinite
        lo[j] = __float2half_rn(rest == rest ? static_cast<float>(rest) : 0.f);
      }
      const int64_t to = place(rows, blockIdx.x, k);
      give<Width>(p.hi + to, hi);
      if (p.lo != nullptr) give<Width>(p.lo + to, lo);
    }
  }
}

template <int Threads, int Floats, int Width, class T>
static cudaError_t launch_team(const SplitRows& p, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(p.rows);
  split_rows_kernel<Threads, Floats, Width, T><<<blocks, Threads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <class T>
static cudaError_t launch_rows(const SplitRows& p, cudaStream_t stream) {
  const bool wide = by_four(p.v, p.v_stride, p.K, sizeof(T)) && by_four(p.c, 4, 4, 1) &&
                    by_four(p.centre, 4, 4, 4);
  if (!wide) return launch_team<256, 16, 1, T>(p, stream);
  if constexpr (sizeof(T) == 4)
    if (p.K > 1024 * 16 && p.K <= 1024 * 32 && p.centre == nullptr)
      return launch_team<1024, 32, 4, T>(p, stream);
  if (p.K > 8192) return launch_team<1024, 16, 4, T>(p, stream);
  return p.K > 2048 ? launch_team<512, 16, 4, T>(p, stream) : launch_team<128, 16, 4, T>(p, stream);
}

cudaError_t launch(const SplitRows& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  // the grid's limit in x; indices within a row, and a step beyond, are int
  if (p.rows > INT32_MAX || p.K > INT32_MAX - (1 << 20)) return cudaErrorInvalidConfiguration;
  return p.is_double ? launch_rows<double>(p, stream) : launch_rows<float>(p, stream);
}
