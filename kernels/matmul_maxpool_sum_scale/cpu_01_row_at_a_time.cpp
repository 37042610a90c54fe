// Rung 1 on a CPU: the chain as it is written, a row and a window at a time.
//   y[i] = scale sum_w max_j (sum_k x[i,k] W[w pool + j, k] + b[w pool + j])
// Who owns what: a call owns rows [begin, end).
// Moves: all of W (4 N K bytes) for each row; W is read from memory B times.
// Wrong with it: each addition waits for the one before, and nothing of W is used twice.
#include "problem.h"

void launch(const Pooled& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const float* x = p.x + i * p.x_stride;
    double sum = 0;
    for (int64_t first = 0; first + p.pool <= p.N; first += p.pool) {
      float top = -INFINITY;
      for (int64_t n = first; n < first + p.pool; ++n) {
        const float* w = p.W + n * p.K;
        float dot = 0;
        for (int64_t k = 0; k < p.K; ++k) dot += x[k] * w[k];
        top = larger(dot + p.b[n], top);
      }
      sum += top;
    }
    p.y[i] = scaled(sum, p.scale);
  }
}
