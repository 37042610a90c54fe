// The fold of a chain that averages neighbouring outputs, of weights and biases at once, on a CPU:
//     w[m,k] = 1/pool sum_j W[m pool + j, k],  b[m] = 1/pool sum_j bias[m pool + j],  m < groups
// added in double, and kept in float, too.
#pragma once
#include <cstdint>

struct MeanFold {
  const float *W, *bias;     // (groups pool, K) contiguous, (groups pool)
  float *w, *b;              // (groups, K), (groups)
  double *w_exact, *b_exact;
  int64_t K, groups, pool;
};

int64_t tasks_of(const MeanFold& p);
int64_t grain_of(const MeanFold& p);  // tasks of a thread, at least
void take_weights(const MeanFold& p, int64_t begin, int64_t end);
void take_bias(const MeanFold& p);
