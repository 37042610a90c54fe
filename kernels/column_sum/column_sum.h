// The fold of every chain that sums the outputs of a Linear:  s[k] = sum_n W[n,k], in double.
#pragma once
#include <cstdint>

struct ColumnSum {
  const float* W;   // (N, K) contiguous
  double* partial;  // (slices, K): sums over a slice of the rows each; unused on a CPU
  double* s;        // (K)
  int64_t N, K, slices;
};

#ifdef WB_CUDA
#include <cuda_runtime.h>
cudaError_t launch(const ColumnSum& p, cudaStream_t stream);
#else
void launch(const ColumnSum& p, int64_t begin, int64_t end);  // strips of columns begin <= i < end
#endif

constexpr int64_t kStrip = 1024;  // columns of one task on a CPU: 4 KB of each row, 8 KB of sums
