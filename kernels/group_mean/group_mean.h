// The fold of every chain that averages neighbouring outputs of a Linear:
//     w[m,k] = 1/pool sum_j W[m pool + j, k],  m < groups = N / pool, added in double.
#pragma once
#include <cstdint>

struct GroupMean {
  const float* W;   // (N, K) contiguous; rows from groups * pool on are not read
  float* w;         // (groups, K) the mean, rounded
  double* w_exact;  // (groups, K) the mean in double, or nullptr
  int64_t K, groups, pool;
};

#ifdef WB_CUDA
#include <cuda_runtime.h>
cudaError_t launch(const GroupMean& p, cudaStream_t stream);
#else
int64_t tasks_of(const GroupMean& p);
int64_t grain_of(const GroupMean& p);  // tasks of a thread, at least
void launch(const GroupMean& p, int64_t begin, int64_t end);  // tasks begin <= i < end
#endif
