// y[i] = sum_k x[i,k] w[k] + b for rows of x, short chains of additions in float, then double.
#pragma once
#include <cstdint>

struct RoundedDot {
  const float* x;        // (B, K), rows x_stride elements apart, features adjacent
  const double* w;       // (K)
  const float* rounded;  // (K): w in float
  const double* b;       // (1)
  float* y;              // (B)
  int64_t B, K, x_stride;
};

void launch(const RoundedDot& p, int64_t begin, int64_t end);  // rows begin <= i < end
