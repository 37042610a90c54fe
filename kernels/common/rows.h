// Sums of rows of a float32 matrix by columns, in double, on a CPU: what folds add weights with.
// Eight rows go by together, what is left four, two and one: a sum is loaded and stored once for eight
// additions, and eight streams of memory are as many as hardware follows. Each column is added in one
// order, whatever its neighbours.
#pragma once
#include <type_traits>

#include "simd.h"

// Columns at a time at most: 32 KB of each row, long enough to be read ahead; 64 KB of sums, in L2.
constexpr int64_t kWide = 8192;

// The sum of 2, 4 or 8 numbers, neighbours first.
template <int Rows, class T>
inline T sum_together(T (&v)[Rows]) {
  for (int rows = Rows / 2; rows > 0; rows /= 2)
    for (int r = 0; r < rows; ++r) v[r] = v[2 * r] + v[2 * r + 1];
  return v[0];
}

// sum[k] += the rows from `a` on, `stride` apart, for k in [from, count).
template <int Rows>
inline void add_together(double* sum, const float* a, int64_t stride, int64_t from, int64_t count) {
  int64_t k = from;
  for (; k + kDoubles <= count; k += kDoubles) {
    doubles v[Rows];
    for (int r = 0; r < Rows; ++r) v[r] = widen(a + r * stride + k);
    store(sum + k, load(sum + k) + sum_together(v));
  }
  for (; k < count; ++k) {
    double v[Rows];
    for (int r = 0; r < Rows; ++r) v[r] = a[r * stride + k];
    sum[k] += sum_together(v);
  }
}

// f(rows, n) for the rows from 0 on: eight at n together, as a constant, what is left 4, 2 and 1.
template <int Rows = 8, class F>
inline void by_eight(int64_t count, const F& f, int64_t n = 0) {
  for (; n + Rows <= count; n += Rows) f(std::integral_constant<int, Rows>{}, n);
  if constexpr (Rows > 1) by_eight<Rows / 2>(count, f, n);
}
