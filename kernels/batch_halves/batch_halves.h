// What a batch-normalised product takes from its batch, on a CPU:
//     mean[k] = mean_i x[i,k],  c[k] = median_g mean_{i of group g} x[i,k],
//     half[i,k] = (x[i,k] - c[k]) / 2
// and behind half a few rows whose sum is the mean: row r has the columns of every rows-th run.
#pragma once
#include <cstdint>

struct BatchHalves {
  const float* x;  // (B, K), rows x_stride elements apart
  float* half;     // (B + rows, K) contiguous
  float* c;        // (K)
  double* mean;    // (K)
  int64_t B, K, x_stride, rows, run;
};

constexpr int64_t kStrip = 256;  // columns of a task: the sums of all groups stay in L1

// Strips of columns begin <= i < end.
void launch(const BatchHalves& p, int64_t begin, int64_t end);
