// What a CPU does with rows of few features: multiply by itself, all in double, for a library is slow
// at a narrow product and no winner has to be computed once more. What is loaded of several rows and
// of several features meets in registers.
#pragma once
#include <cmath>

#include "problem.h"
#include "row.h"

constexpr int kRows = 4;  // of x, together

// u[r][m] = sum_k x[r,k] w[m,k] in double, each in chains of its own, whatever the size of the tile; rows of x lie `stride` apart, w (Features, K) is in float or in double.
template <int Rows, int Features, class T>
inline void dots(const float* x, int64_t stride, const T* w, int64_t K,
                 double (&u)[Rows][Features]) {
  doubles sum[Rows][Features] = {};
  const int64_t whole = K - K % kDoubles;
  for (int64_t k = 0; k < whole; k += kDoubles) {
    doubles weights[Features];
    for (int m = 0; m < Features; ++m) weights[m] = widen(w + m * K + k);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const doubles wide = widen(x + r * stride + k);
#pragma GCC unroll 4
      for (int m = 0; m < Features; ++m) sum[r][m] += wide * weights[m];
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int m = 0; m < Features; ++m) {
      u[r][m] = sum_lanes(sum[r][m]);
      for (int64_t k = whole; k < K; ++k)
        u[r][m] += static_cast<double>(x[r * stride + k]) * w[m * K + k];
    }
}

// Features m.. of Rows rows from i on join their ends. A u that float32 can't hold is infinite for a
// float32 model.
template <int Rows, int Features>
void join_features(const PoolChain& p, int64_t i, int64_t m, Ends<double> (&ends)[Rows]) {
  const bool dips = p.scale < 0;
  const float* x = p.x + i * p.x_stride;
  double u[Rows][Features];
  if (p.w_exact) {
    dots(x, p.x_stride, p.w_exact + m * p.K, p.K, u);
  } else {
    dots(x, p.x_stride, p.w + m * p.K, p.K, u);
  }
  for (int r = 0; r < Rows; ++r)
    for (int f = 0; f < Features; ++f) {
      const double sum = u[r][f] + (p.b_exact ? p.b_exact[m + f] : p.b[m + f]);
      const float rounded = static_cast<float>(sum);
      ends[r] = joined(ends[r], ends_of(std::isinf(rounded) ? rounded : sum, dips), dips);
    }
}

// y of Rows rows from i on.
template <int Rows>
void from_x(const PoolChain& p, int64_t i) {
  Ends<double> ends[Rows];
  for (auto& e : ends) e = no_ends<double>(p.scale < 0);
  int64_t m = 0;
  for (; m + 4 <= p.M; m += 4) join_features<Rows, 4>(p, i, m, ends);
  switch (p.M - m) {
    case 3: join_features<Rows, 3>(p, i, m, ends); break;
    case 2: join_features<Rows, 2>(p, i, m, ends); break;
    case 1: join_features<Rows, 1>(p, i, m, ends);
  }
  for (int r = 0; r < Rows; ++r)
    p.y[i + r] = static_cast<float>(
        larger(value(ends[r].left, p.scale), value(ends[r].right, p.scale)));
}
