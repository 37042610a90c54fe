// The fold of a chain of maxima of pairs, of weights and biases at once, on a CPU: differences of pairs,
// and sums over all features.
//     D[m,k] = W[2m,k] - W[2m+1,k],  w_sum[k] = sum_n W[n,k],  shifts[m] = b[2m] - b[2m+1],  b_sum = sum_n b[n]
#pragma once
#include <cstdint>

struct PairFold {
  const float *W, *bias;           // (2 M, K) contiguous, (2 M)
  float* D;                        // (M, K)
  double *shifts, *w_sum, *b_sum;  // (M), (K), ()
  int64_t M, K;
};

int64_t tasks_of(const PairFold& p);
void take_weights(const PairFold& p, int64_t begin, int64_t end);  // tasks: strips of columns
void take_bias(const PairFold& p);
