// The fold of every chain that averages neighbouring outputs of a Linear:
//     w[m,k] + w_low[m,k] = 1/pool sum_j W[m pool + j, k],  m < groups = N / pool, added in double.
#pragma once
#include <cstdint>

struct GroupMean {
  const float* W;  // (N, K) contiguous; rows from groups * pool on are not read
  float* w;        // (groups, K) the mean, rounded
  float* w_low;    // (groups, K) what the rounding left over, or nullptr
  int64_t K, groups, pool;
};

#ifdef WB_CUDA
#include <cuda_runtime.h>
cudaError_t launch(const GroupMean& p, cudaStream_t stream);
#else
void launch(const GroupMean& p, int64_t begin, int64_t end);  // tasks begin <= i < end
#endif

// The mean of float32 numbers, which float32 holds, in two pieces; no rest beside an inf or a NaN.
#ifdef __CUDACC__
__host__ __device__ __forceinline__
#else
inline
#endif
    void write_mean(const GroupMean& p, int64_t at, double sum) {
  const double mean = sum / p.pool;
  const float rounded = static_cast<float>(mean);
  p.w[at] = rounded;
  if (p.w_low) p.w_low[at] = rounded - rounded == 0 ? static_cast<float>(mean - rounded) : 0.f;
}

constexpr int64_t kStrip = 1024;  // columns of one task on a CPU: 4 KB of each row, 8 KB of sums
