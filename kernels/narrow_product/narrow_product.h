// z[i,n] = sum_k x[i,k] W[n,k] in short chains. For a few rows of x reading the weights bounds it.
#pragma once
#include <cstdint>

struct NarrowProduct {
  const float* x;  // (B, K), rows x_stride elements apart, features adjacent
  const float* W;  // (N, K), rows W_stride elements apart, features adjacent
  float* z;        // (B, N), rows z_stride elements apart
  int64_t B, K, N;
  int64_t x_stride, W_stride, z_stride;
};

constexpr int64_t kOutputs = 4;  // of W that go together

void launch(const NarrowProduct& p, int64_t begin, int64_t end);  // kOutputs at a time
