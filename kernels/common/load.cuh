// Loads that say how often the data is used, and how much of it comes at once.
#pragma once
#include <cstdint>

// Width floats that are read once (they do not displace the folded weights from L1), or zeros where
// `inside` is false: a predicate and no branch, so that many loads can be issued back to back.
template <int Width>
__device__ __forceinline__ void load_once(float (&v)[Width], const float* address, bool inside) {
  static_assert(Width == 1 || Width == 4, "a float or a vector of 16 bytes");
  if constexpr (Width == 4)
    asm volatile(
        "{\n.reg .pred in;\nsetp.ne.s32 in, %5, 0;\n"
        "mov.f32 %0, 0f00000000;\nmov.f32 %1, 0f00000000;\nmov.f32 %2, 0f00000000;\nmov.f32 %3, "
        "0f00000000;\n"
        "@in ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&f"(v[0]), "=&f"(v[1]), "=&f"(v[2]), "=&f"(v[3])
        : "l"(address), "r"(static_cast<int>(inside)));
  else
    asm volatile(
        "{\n.reg .pred in;\nsetp.ne.s32 in, %2, 0;\nmov.f32 %0, 0f00000000;\n"
        "@in ld.global.nc.L1::no_allocate.f32 %0, [%1];\n}"
        : "=&f"(v[0])
        : "l"(address), "r"(static_cast<int>(inside)));
}

// sum += v . weight over Width features, in double.
template <int Width>
__device__ __forceinline__ double dot(const float (&v)[Width], const double* weight, double sum) {
  if constexpr (Width == 4) {
    const double2 lo = __ldg(reinterpret_cast<const double2*>(weight));
    const double2 hi = __ldg(reinterpret_cast<const double2*>(weight) + 1);
    sum = fma(static_cast<double>(v[0]), lo.x, sum);
    sum = fma(static_cast<double>(v[1]), lo.y, sum);
    sum = fma(static_cast<double>(v[2]), hi.x, sum);
    return fma(static_cast<double>(v[3]), hi.y, sum);
  } else {
    return fma(static_cast<double>(v[0]), __ldg(weight), sum);
  }
}

// True where rows `stride` elements apart, starting at `base`, can be read by 16 bytes.
inline bool rows_are_float4(const float* base, int64_t stride, int64_t features) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && stride % 4 == 0 && features % 4 == 0;
}
