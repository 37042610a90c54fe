// Rung 2 on a CPU: W is summed over its rows once, outside; one dot product a sample is left.
//   y[i] = sum_k x[i,k] w_sum[k] + b_sum
// Who owns what: a call owns rows [begin, end), one at a time.
// Moves: x once, 4 B K bytes; w_sum (8 K bytes) stays in the cache.
// Against rung 1: N times fewer operations and bytes. Each addition waits for the one before: a sum
//   over one variable may not be reordered, so it is not vectorised.
#include "problem.h"

void launch(const SumChain& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const float* x = p.x + i * p.x_stride;
    double sum = 0;
    for (int64_t k = 0; k < p.K; ++k) sum += static_cast<double>(x[k]) * p.w_sum[k];
    p.y[i] = static_cast<float>(sum + *p.b_sum);
  }
}
