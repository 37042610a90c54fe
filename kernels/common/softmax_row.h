// A piece of a row on a CPU: its map, its maximum, its sum of exp. Loops that compilers vectorise.
// A Map has shift, a and d, of a feature each:  t = a (z + shift) + d
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

#include "exp.h"

constexpr int kLanes = 16, kPiece = 512;  // partial sums; floats of a piece, which stay in L1
constexpr float kNothing = -std::numeric_limits<float>::infinity();  // the maximum of no elements

template <class Map>
inline float mapped(const Map& p, int64_t n, float z) {
  return p.a[n] * (z + p.shift[n]) + p.d[n];
}

// t <- the map of z, which belongs to features n ..., then -inf up to whole lanes: exp gives 0.
template <class Map>
inline int map_piece(const Map& p, const float* z, int64_t n, int count, float* t) {
  const float *shift = p.shift + n, *a = p.a + n, *d = p.d + n;
  for (int k = 0; k < count; ++k) t[k] = a[k] * (z[k] + shift[k]) + d[k];
  const int padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int k = count; k < padded; ++k) t[k] = kNothing;
  return padded;
}

inline float max_of(const float* t, int count) {
  float most = kNothing;  // a NaN compares false: the sum will have it
#pragma omp simd reduction(max : most)
  for (int k = 0; k < count; ++k) most = most < t[k] ? t[k] : most;
  return most;
}

// Neighbours first, in double: a fixed order.
inline double sum_of_lanes(const float* sum) {
  double pair[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) pair[lane] = sum[lane];
  for (int count = kLanes / 2; count > 0; count /= 2)
    for (int lane = 0; lane < count; ++lane) pair[lane] = pair[2 * lane] + pair[2 * lane + 1];
  return pair[0];
}

inline double sum_of_exp(const float* t, int padded, float m) {
  float sum[kLanes] = {};
  for (int k = 0; k < padded; k += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) sum[lane] += exp_of(t[k + lane] - m);
  return sum_of_lanes(sum);
}

// t <- e^(t-m), at any count; their sum.
inline double replace_by_exp(float* t, int count, float m) {
  float sum[kLanes] = {};
  const int whole = count - count % kLanes;
  for (int k = 0; k < whole; k += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) sum[lane] += t[k + lane] = exp_of(t[k + lane] - m);
  for (int k = whole; k < count; ++k) sum[k - whole] += t[k] = exp_of(t[k] - m);
  return sum_of_lanes(sum);
}

// y <- e^(t-m) / s of a row z that is there as a whole, which may be y: one exp an element.
template <class Map>
inline void softmax_of_row(const Map& p, const float* z, float* y) {
  for (int64_t n = 0; n < p.N; ++n) y[n] = mapped(p, n, z[n]);
  float m = kNothing;
  double s = 0;
  for (int64_t n = 0; n < p.N; n += kPiece)
    m = std::max(m, max_of(y + n, static_cast<int>(std::min<int64_t>(kPiece, p.N - n))));
  const float from = m == kNothing ? 0 : m;  // -inf - -inf would be NaN
  for (int64_t n = 0; n < p.N; n += kPiece)
    s += replace_by_exp(y + n, static_cast<int>(std::min<int64_t>(kPiece, p.N - n)), from);
  const float each = static_cast<float>(1 / s);
  for (int64_t n = 0; n < p.N; ++n) y[n] *= each;
}
