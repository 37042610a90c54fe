// A piece of a row on a CPU: its map, its maximum, its sum of exp. Loops that compilers vectorise.
#pragma once
#include <cstdint>
#include <limits>

#include "exp.h"
#include "problem.h"

constexpr int kLanes = 16, kPiece = 512;  // partial sums; floats of a piece, which stay in L1
constexpr float kNothing = -std::numeric_limits<float>::infinity();  // the maximum of no elements

inline float mapped(const Tail& p, int64_t n, float z) {
  return p.a[n] * (z + p.shift[n]) + p.d[n];
}

// t <- the map of z, which belongs to features n ..., then -inf up to whole lanes: exp gives 0.
inline int map_piece(const Tail& p, const float* z, int64_t n, int count, float* t) {
  const float *shift = p.shift + n, *a = p.a + n, *d = p.d + n;
  for (int k = 0; k < count; ++k) t[k] = a[k] * (z[k] + shift[k]) + d[k];
  const int padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int k = count; k < padded; ++k) t[k] = kNothing;
  return padded;
}

inline float max_of(const float* t, int padded) {
  float most = kNothing;  // a NaN compares false: the sum will have it
#pragma omp simd reduction(max : most)
  for (int k = 0; k < padded; ++k) most = most < t[k] ? t[k] : most;
  return most;
}

// In a fixed order: lanes, then the lanes' sums in double.
inline double sum_of_exp(const float* t, int padded, float m) {
  float sum[kLanes] = {};
  for (int k = 0; k < padded; k += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) sum[lane] += exp_of(t[k + lane] - m);
  double total = 0;
  for (const float lane : sum) total += lane;
  return total;
}
