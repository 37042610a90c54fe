// Width neighbours from memory and to it: four at once, or one.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

template <int Width, class T>
__device__ __forceinline__ void take(T (&v)[Width], const T* from) {
  static_assert(Width == 4 || Width == 1, "vectors of four, or single numbers");
  if constexpr (Width == 4 && sizeof(T) == 4) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
  } else if constexpr (Width == 4) {
    const double2 a = reinterpret_cast<const double2*>(from)[0];
    const double2 b = reinterpret_cast<const double2*>(from)[1];
    v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y;
  } else {
    v[0] = *from;
  }
}

template <int Width>
__device__ __forceinline__ void take(int (&c)[Width], const int8_t* from) {
  if constexpr (Width == 4) {
    const char4 four = __ldg(reinterpret_cast<const char4*>(from));
    c[0] = four.x, c[1] = four.y, c[2] = four.z, c[3] = four.w;
  } else {
    c[0] = __ldg(from);
  }
}

// Each in one store: of a plain copy the compiler may make several, of parts of their sectors. What is
// written none reads in the same kernel.
template <int Width>
__device__ __forceinline__ void give(half* to, const half (&v)[Width]) {
  if constexpr (Width == 4) {
    const half2 a = __halves2half2(v[0], v[1]), b = __halves2half2(v[2], v[3]);
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to),
                 "r"(reinterpret_cast<const uint32_t&>(a)),
                 "r"(reinterpret_cast<const uint32_t&>(b)));
  } else {
    *to = v[0];
  }
}

template <int Width>
__device__ __forceinline__ void give(float* to, const float (&v)[Width]) {
  if constexpr (Width == 4)
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v[0]), "f"(v[1]),
                 "f"(v[2]), "f"(v[3]));
  else
    *to = v[0];
}

// True where rows of K numbers of `bytes` each, `stride` apart, can be read four at a time.
inline bool by_four(const void* v, int64_t stride, int64_t K, int64_t bytes) {
  const int64_t vector = bytes < 4 ? 4 * bytes : 16;
  return reinterpret_cast<uintptr_t>(v) % vector == 0 && stride * bytes % vector == 0 && K % 4 == 0;
}
