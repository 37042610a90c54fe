// What a CPU does with one row: find the two u that can win, and a dot product in double.
#pragma once
#include <cmath>

#include "gelu.h"
#include "simd.h"

constexpr int kSums = 4;

inline Ends<float> ends_of_row(const float* u, int64_t count, bool dips) {
  Ends<floats> lanes = no_ends<floats>(dips);
  const int64_t whole = count - count % kFloats;
  for (int64_t m = 0; m < whole; m += kFloats) {
    lanes = joined(lanes, ends_of(load(u + m), dips), dips);
  }
  Ends<float> ends = no_ends<float>(dips);
  for (int l = 0; l < kFloats; ++l) ends = joined(ends, {lanes.left[l], lanes.right[l]}, dips);
  for (int64_t m = whole; m < count; ++m) ends = joined(ends, ends_of(u[m], dips), dips);
  return ends;
}

// scale * gelu of a u that may be missing for scale < 0.
inline double value(double u, double scale) {
  return scale < 0 && u == -INFINITY ? -INFINITY : scale * gelu(u);
}

// The best of the two and which; asks no GELU where the sign tells, but NaN and infinities stay.
struct Winner {
  double best;
  bool is_right;
};

inline Winner winner_of(Ends<float> ends, double scale) {
  const bool finite = std::isfinite(ends.left) && std::isfinite(ends.right) && std::isfinite(scale);
  if (finite && scale >= 0 && ends.right >= 0) return {0, true};
  const double left = value(ends.left, scale), right = value(ends.right, scale);
  return {larger(left, right), right >= left};
}

// The first m with u[m] == value; the last m of all where none has it, as none does a NaN.
inline int64_t place_of(float value, const float* u, int64_t count) {
  constexpr int64_t kAtOnce = 32;  // compared without a branch, so by vectors
  int64_t m = 0;
  for (; m + kAtOnce < count; m += kAtOnce) {
    int there = 0;
    for (int64_t j = 0; j < kAtOnce; ++j) there |= u[m + j] == value;
    if (there) break;
  }
  while (m < count - 1 && u[m] != value) ++m;
  return m;
}

inline doubles widen(const double* address) { return load(address); }

// sum_k x[k] w[k] in double, in a fixed order; w in float or in double.
template <class T>
inline double dot(const float* x, const T* w, int64_t K) {
  doubles sum[kSums] = {};
  const int64_t whole = K - K % (kSums * kDoubles);
  for (int64_t k = 0; k < whole; k += kSums * kDoubles)
    for (int s = 0; s < kSums; ++s)
      sum[s] += widen(x + k + s * kDoubles) * widen(w + k + s * kDoubles);
  double total = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
  for (int64_t k = whole; k < K; ++k) total += static_cast<double>(x[k]) * w[k];
  return total;
}
