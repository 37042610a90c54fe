// Exponents of numbers, and powers of two that are made of them: no rounding anywhere.
#pragma once
#include <cstdint>

constexpr int kNoExponent = INT32_MIN;  // of zeros and of what is not finite

// 2^exponent <= |v| < 2^(exponent + 1); what is below the normal numbers counts as the least of them.
__device__ __forceinline__ int exponent_of(float v) {
  const int biased = __float_as_int(v) >> 23 & 0xff;
  return biased == 0xff || v == 0.f ? kNoExponent : biased - 127;
}

__device__ __forceinline__ int exponent_of(double v) {
  const int biased = __double2hiint(v) >> 20 & 0x7ff;
  return biased == 0x7ff || v == 0. ? kNoExponent : biased - 1023;
}

// 2^s, an ordinary number: s in [-126, 127], of a double more.
template <class T = float>
__device__ __forceinline__ T power_of_two(int s) {
  if constexpr (sizeof(T) == 4)
    return __int_as_float((s + 127) << 23);
  else
    return __hiloint2double((s + 1023) << 20, 0);
}

// v 2^s in two steps, each within float's exponents; beyond 2^+-252 it is all the same.
template <class T>
__device__ __forceinline__ T raised(T v, int s) {
  s = min(max(s, -252), 254);
  return v * power_of_two<T>(s >> 1) * power_of_two<T>(s - (s >> 1));
}
