// The fold of a chain of maxima of pairs: D[m,k] = W[2m,k] - W[2m+1,k], and s[k] = sum_n W[n,k] in
// double, in one go over W.
#pragma once
#include <cstdint>

struct PairDifference {
  const float* W;   // (2 M, K) contiguous
  float* D;         // (M, K)
  double* partial;  // (slices, K): sums over a slice of the pairs each; unused on a CPU
  double* s;        // (K)
  int64_t M, K, slices;
};

#ifdef WB_CUDA
#include <cuda_runtime.h>
cudaError_t launch(const PairDifference& p, cudaStream_t stream);
#else
void launch(const PairDifference& p, int64_t begin, int64_t end);  // strips of columns begin <= i < end
#endif

constexpr int64_t kStrip = 1024;  // columns of one task on a CPU: 4 KB of each row, 8 KB of sums
