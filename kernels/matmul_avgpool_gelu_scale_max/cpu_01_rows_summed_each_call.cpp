// Rung 1 on a CPU: the chain as it is written, but for its intermediates: one feature at a time.
//   z[n] = sum_k x[k] W[n,k] + bias[n];  u[m] = mean of pool z;  y = max_m scale * gelu(u[m])
// Who owns what: a call owns rows [begin, end), one at a time.
// Moves: all of W (4 N K bytes) for each row; W is read from memory B times.
// Wrong with it: 2 B N K operations in one chain of additions, `pool` times what the mean needs; a
//   GELU for each group.
#include "gelu.h"
#include "problem.h"

void launch(const PoolChain& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const float* x = p.x + i * p.x_stride;
    float best = -INFINITY;
    for (int64_t m = 0; m < p.M; ++m) {
      float sum = 0;
      for (int64_t n = m * p.pool; n < (m + 1) * p.pool; ++n) {
        const float* W = p.W + n * p.K;
        float dot = 0;
        for (int64_t k = 0; k < p.K; ++k) dot += x[k] * W[k];
        sum += dot + p.bias[n];
      }
      const float u = sum / static_cast<float>(p.pool);
      best = larger(best, static_cast<float>(p.scale * gelu(u)));
    }
    p.y[i] = best;
  }
}
