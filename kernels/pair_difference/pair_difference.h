// The fold of a chain of maxima of pairs: D[m,k] = W[2m,k] - W[2m+1,k], and s[k] = sum_n W[n,k] in
// double, in one go over W.
#pragma once
#include <cstdint>

struct PairDifference {
  const float* W;  // (2 M, K) contiguous
  float* D;        // (M, K)
  double* s;       // (K)
  int64_t M, K;
};

// Strips of columns begin <= i < end.
void launch(const PairDifference& p, int64_t begin, int64_t end);

constexpr int64_t kStrip = 1024;  // columns of one task: 4 KB of each row, 8 KB of sums
