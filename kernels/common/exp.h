// exp on a CPU, in C++ that compilers turn into vectors: no branch, no call, no table.
#pragma once
#include <bit>
#include <cstdint>

// e^v for v <= 0, within 1.02 ulp; NaN stays NaN, -inf gives 0.
//   v = n ln2 + r with n whole, |r| <= ln2 / 2;  e^v = 2^n e^r, e^r by a polynomial
inline float exp_of(float v) {
  constexpr float kLowest = -104.0f;  // e^v is below half of the least float: 0
  constexpr float kLog2E = 1.44269504f;
  constexpr float kRound = 12582912.0f;       // 1.5 * 2^23: adding it leaves no room for fractions
  constexpr float kLn2High = 0.693359375f;    // 10 bits: n times this is exact
  constexpr float kLn2Low = -2.12194440e-4f;  // ln2 - kLn2High
  v = v < kLowest ? kLowest : v;              // a NaN is kept: it compares false
  const float shifted = v * kLog2E + kRound;
  const float n = shifted - kRound;
  const float r = (v - n * kLn2High) - n * kLn2Low;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // 2^n in two factors: neither leaves the normal range, where the product may
  const int32_t whole = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRound);
  const int32_t half = whole >> 1;
  const float first = std::bit_cast<float>((half + 127) << 23);
  const float second = std::bit_cast<float>((whole - half + 127) << 23);
  return p * first * second;
}
