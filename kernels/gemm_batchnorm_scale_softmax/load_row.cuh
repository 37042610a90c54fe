// Loads and stores of a row by one float or by 16 bytes, and its map.
#pragma once
#include "row.cuh"

// Last: past the caches, since nobody reads it again. Not as constant memory: y is written too.
template <int Width, bool Last = true>
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

template <int Width>
__device__ __forceinline__ void store_row(float* address, const float (&v)[Width], float factor) {
  if constexpr (Width == 4)
    __stcs(reinterpret_cast<float4*>(address),
           make_float4(v[0] * factor, v[1] * factor, v[2] * factor, v[3] * factor));
  else
    __stcs(address, v[0] * factor);
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

template <int Width>
__device__ __forceinline__ float max_of(const float (&v)[Width], float m) {
#pragma unroll
  for (int j = 0; j < Width; ++j) m = fmaxf(m, v[j]);
  return m;
}

// v <- exp(v - m); the sum.
template <int Width>
__device__ __forceinline__ float exp_sum(float (&v)[Width], float m) {
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < Width; ++j) sum += v[j] = expf(v[j] - m);
  return sum;
}

// True where every row of y, and the map, can be read by 16 bytes.
inline bool is_float4(const Tail& p) {
  const auto at = [](const float* address) { return reinterpret_cast<uintptr_t>(address); };
  return p.N % 4 == 0 && (at(p.y) | at(p.shift) | at(p.a) | at(p.d)) % 16 == 0;
}
