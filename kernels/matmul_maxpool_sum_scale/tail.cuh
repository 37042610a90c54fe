// A thread's share of the maxima of a row's windows, for a block of kThreads threads a row.
#pragma once
#include "load.cuh"
#include "problem.h"
#include "reduce.cuh"

constexpr int kThreads = 512, kWarps = kThreads / kWarp, kAtOnce = 8, kVector = 4;

__device__ __forceinline__ float with_bias(const Pooled& p, float z, int64_t n) {
#ifdef WB_BIAS
  return z + __ldg(p.b + n);
#else
  return z;
#endif
}

// v, of columns n to n + kVector, with their bias.
__device__ __forceinline__ void add_bias(const Pooled& p, float (&v)[kVector], int64_t n) {
#ifdef WB_BIAS
  const float4 b = __ldg(reinterpret_cast<const float4*>(p.b + n));
  v[0] += b.x, v[1] += b.y, v[2] += b.z, v[3] += b.w;
#endif
}

// True where rows, and the bias, can be read by 16 bytes.
inline bool reads_by_vectors(const Pooled& p) {
#ifdef WB_BIAS
  if (!rows_are_float4(p.b, p.N, p.N)) return false;
#endif
  return rows_are_float4(p.z, p.N, p.N);
}

// A thread's share of a row's maxima, by vectors of whole windows; N is a multiple of kVector.
template <int Pool>
__device__ __forceinline__ double sum_of_vectors(const Pooled& p, const float* z) {
  static_assert(kVector % Pool == 0, "a window does not end in the next vector");
  constexpr int64_t kStride = kThreads * kVector;
  double sum = 0;
  for (int64_t first = threadIdx.x * kVector; first < p.N; first += kAtOnce * kStride) {
    float v[kAtOnce][kVector];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      load_once<kVector>(v[u], z + first + u * kStride, first + u * kStride < p.N);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t n = first + u * kStride;
      if (n >= p.N) break;
      add_bias(p, v[u], n);
#pragma unroll
      for (int w = 0; w < kVector; w += Pool) {
        float top = v[u][w];
#pragma unroll
        for (int j = w + 1; j < w + Pool; ++j) top = larger(v[u][j], top);
        sum += top;
      }
    }
  }
  return sum;
}

// The same of any pool, by windows. Loads go by L1: those of a window's next feature find it there.
__device__ __forceinline__ double sum_of_windows(const Pooled& p, const float* z) {
  const bool by_warp = p.pool >= kWarp;
  const int64_t step = by_warp ? kWarp : 1, teams = by_warp ? kWarps : kThreads;
  const int64_t lane = threadIdx.x % step, team = threadIdx.x / step;
  const int64_t stride = teams * p.pool, last = p.N - p.pool;  // of windows
  double sum = 0;
  for (int64_t first = team * p.pool; first <= last; first += kAtOnce * stride) {
    float top[kAtOnce], v[kAtOnce];
    for (int64_t j = lane; j < p.pool; j += step) {
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int64_t n = first + u * stride + j;
        v[u] = n < p.N ? with_bias(p, __ldg(z + n), n) : 0.0f;
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) top[u] = j == lane ? v[u] : larger(v[u], top[u]);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      for (int offset = kWarp / 2; by_warp && offset > 0; offset /= 2)
        top[u] = larger(__shfl_xor_sync(kFullWarp, top[u], offset), top[u]);
      if (lane == 0 && first + u * stride <= last) sum += top[u];
    }
  }
  return sum;
}
