// A number as two halves, and where these stand: by panels of 32 columns, (2 pairs, rows rounded up to
// 8, 32), as products read them; of row r the 16 bytes c stand at c ^ (r / 2 % 4).
#pragma once
#include <cuda_fp16.h>

#include "exponent.cuh"
#include "vector.cuh"

constexpr int kPanel = 32;  // columns of a panel
constexpr int kTop = 14;    // exponent of the largest that is split: halves end below 2^16

// Where (row, k) stands.
__device__ __forceinline__ int64_t place(int rows, int row, unsigned k) {
  const unsigned chunk = (k % kPanel / 8) ^ (static_cast<unsigned>(row) / 2 % 4);
  return (k / kPanel * int64_t{(rows + 7) / 8 * 8} + row) * kPanel + chunk * 8 + k % 8;
}

// v <- v 2^s, Width neighbours.
template <int Width, class T>
__device__ __forceinline__ void scale(T (&v)[Width], const int (&s)[Width]) {
  constexpr int kNear = 64;
  unsigned beyond = 0;
#pragma unroll
  for (int j = 0; j < Width; ++j) beyond |= static_cast<unsigned>(s[j] + kNear);
  if (beyond < 2 * kNear) {  // a power of two: so are all of them
#pragma unroll
    for (int j = 0; j < Width; ++j) v[j] *= power_of_two<T>(s[j]);
  } else {
#pragma unroll
    for (int j = 0; j < Width; ++j) v[j] = raised(v[j], s[j]);
  }
}

// hi + lo <- v, Width neighbours; lo may be null.
template <int Width, class T>
__device__ __forceinline__ void give_halves(half* hi, half* lo, int64_t to, const T (&v)[Width]) {
  half h[Width], l[Width];
#pragma unroll
  for (int j = 0; j < Width; ++j) {
    h[j] = __float2half_rn(static_cast<float>(v[j]));
    const T rest = v[j] - static_cast<T>(__half2float(h[j]));  // NaN where h is infinite
    l[j] = __float2half_rn(rest == rest ? static_cast<float>(rest) : 0.f);
  }
  give<Width>(hi + to, h);
  if (lo != nullptr) give<Width>(lo + to, l);
}
