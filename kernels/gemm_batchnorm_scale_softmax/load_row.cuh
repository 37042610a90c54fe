// A piece of a row in the registers of a team of threads: Loads loads a thread, of Width floats each,
// kStep features apart; n is the first of a thread's features. Loops are unrolled: no array is left.
#pragma once
#include "row.cuh"

// v <- the row at `address`. Last: past the caches, nobody reads it again. Not as constant memory:
// the row is written too.
template <int Width, bool Last>
__device__ __forceinline__ void load_row(float (&v)[Width], const float* address) {
  static_assert(Width == 1 || Width == 4, "a float or a vector of 16 bytes");
  if constexpr (Width == 4) {
    const float4* fours = reinterpret_cast<const float4*>(address);
    const float4 four = Last ? __ldcs(fours) : *fours;
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
  } else {
    v[0] = Last ? __ldcs(address) : *address;
  }
}

// v <- the map of features n, n + 1, ...; shift, a and d stay in L1, as every row reads them.
template <int Width>
__device__ __forceinline__ void map_row(float (&v)[Width], const Tail& p, int64_t n) {
  if constexpr (Width == 4) {
    const float4 shift = __ldg(reinterpret_cast<const float4*>(p.shift + n));
    const float4 a = __ldg(reinterpret_cast<const float4*>(p.a + n));
    const float4 d = __ldg(reinterpret_cast<const float4*>(p.d + n));
    v[0] = fmaf(a.x, v[0] + shift.x, d.x);
    v[1] = fmaf(a.y, v[1] + shift.y, d.y);
    v[2] = fmaf(a.z, v[2] + shift.z, d.z);
    v[3] = fmaf(a.w, v[3] + shift.w, d.w);
  } else {
    v[0] = mapped(p, n, v[0]);
  }
}

// t <- the map of a piece of the row `row`; the piece's maximum. All loads are under way before the
// first is used.
template <int Team, bool Last, int Loads, int Width>
__device__ __forceinline__ float take(float (&t)[Loads][Width], const Tail& p, const float* row,
                                      int64_t n) {
  constexpr int kStep = Team * Width;
  const int64_t left = p.N - n;
#pragma unroll
  for (int u = 0; u < Loads; ++u)
    if (u * kStep < left) load_row<Width, Last>(t[u], row + n + u * kStep);
  float m = -INFINITY;
#pragma unroll
  for (int u = 0; u < Loads; ++u)
    if (u * kStep < left) {
      map_row<Width>(t[u], p, n + u * kStep);
#pragma unroll
      for (int j = 0; j < Width; ++j) m = fmaxf(m, t[u][j]);
    }
  return m;
}

// t <- exp(t - m); the sum.
template <int Team, int Loads, int Width>
__device__ __forceinline__ float exp_sum(float (&t)[Loads][Width], float m, int64_t left) {
  float sum = 0.f;
#pragma unroll
  for (int u = 0; u < Loads; ++u)
    if (u * Team * Width < left)
#pragma unroll
      for (int j = 0; j < Width; ++j) sum += t[u][j] = expf(t[u][j] - m);
  return sum;
}

// y <- t times factor.
template <int Team, int Loads, int Width>
__device__ __forceinline__ void give(float* y, const float (&t)[Loads][Width], float factor,
                                     int64_t left) {
#pragma unroll
  for (int u = 0; u < Loads; ++u) {
    float* address = y + u * Team * Width;
    if (u * Team * Width >= left) continue;
    if constexpr (Width == 4)
      __stcs(reinterpret_cast<float4*>(address),
             make_float4(t[u][0] * factor, t[u][1] * factor, t[u][2] * factor, t[u][3] * factor));
    else
      __stcs(address, t[u][0] * factor);
  }
}

// True where every row of y, and the map, can be read by 16 bytes.
inline bool is_float4(const Tail& p) {
  const auto at = [](const float* address) { return reinterpret_cast<uintptr_t>(address); };
  return p.N % 4 == 0 && (at(p.y) | at(p.shift) | at(p.a) | at(p.d)) % 16 == 0;
}
