// Sums of rows of a float32 matrix by columns, in double, on a CPU: what folds add weights with.
// Eight rows go by together, what is left four, two and one: a sum is loaded and stored once for eight
// additions, and eight streams of memory are as many as hardware follows. Each column is added in one
// order, whatever its neighbours.
#pragma once
#include <type_traits>

#include "simd.h"

// Columns at a time at most, of strips that follow one another: 32 KB of each row, long enough to be
// read ahead; 64 KB of sums, in L2.
constexpr int64_t kWide = 8192;

// The sum of 2, 4 or 8 numbers, neighbours first.
template <int Rows, class T>
inline T sum_together(T (&v)[Rows]) {
  for (int rows = Rows / 2; rows > 0; rows /= 2)
    for (int r = 0; r < rows; ++r) v[r] = v[2 * r] + v[2 * r + 1];
  return v[0];
}

// f(k, total) for the columns k from 0 on, kDoubles of them in a vector while there are as many, then
// one in a double: total is the sum of the rows from `a` on, `stride` apart. With Squares f(k, total,
// squares): that of their squares too, which are exact in double.
template <int Rows, bool Squares = false, class F>
inline void total_together(const float* a, int64_t stride, int64_t count, const F& f) {
  const auto take = [&](int64_t k, auto(&v)[Rows]) {
    if constexpr (Squares) {
      std::remove_reference_t<decltype(v)> squares;
      for (int r = 0; r < Rows; ++r) squares[r] = v[r] * v[r];
      f(k, sum_together(v), sum_together(squares));
    } else {
      f(k, sum_together(v));
    }
  };
  const int64_t whole = count - count % kDoubles;
  for (int64_t k = 0; k < whole; k += kDoubles) {
    doubles v[Rows];
    for (int r = 0; r < Rows; ++r) v[r] = widen(a + r * stride + k);
    take(k, v);
  }
  for (int64_t k = whole; k < count; ++k) {
    double v[Rows];
    for (int r = 0; r < Rows; ++r) v[r] = a[r * stride + k];
    take(k, v);
  }
}

// What stands at an address, as much as `like`; and the way back.
inline doubles read(const double* address, doubles) { return load(address); }
inline double read(const double* address, double) { return *address; }
inline void write(double* address, doubles v) { store(address, v); }
inline void write(double* address, double v) { *address = v; }
inline void write(float* address, doubles v) { narrow(address, v); }
inline void write(float* address, double v) { *address = static_cast<float>(v); }

template <class T>
inline void add(double* address, T v) {
  write(address, read(address, v) + v);
}

// f(rows, n) for the rows from 0 on: eight at n together, as a constant, what is left 4, 2 and 1.
template <int Rows = 8, class F>
inline void by_eight(int64_t count, const F& f, int64_t n = 0) {
  for (; n + Rows <= count; n += Rows) f(std::integral_constant<int, Rows>{}, n);
  if constexpr (Rows > 1) by_eight<Rows / 2>(count, f, n);
}
