// Rung 1 on a CPU: the maximum first, then the sum of exp, then the division.
//   t = a (z + shift) + d;  m = max_n t[n];  s = sum_n exp(t[n] - m);  y[n] = exp(t[n] - m) / s
// Who owns what: a call owns rows [begin, end), one at a time, after the whole product is there.
// Moves: the row three times in and out, from the cache but for the first.
// Against torch's chain: BatchNorm and scale are one map. exp is a call for each element, and each
//   addition waits for the one before it.
#include <cmath>

#include "problem.h"
#include "softmax_row.h"

void launch(const Tail& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    float* y = p.y + i * p.N;
    float m = kNothing;
    for (int64_t n = 0; n < p.N; ++n) {
      y[n] = mapped(p, n, y[n]);
      m = m < y[n] ? y[n] : m;
    }
    double s = 0;
    for (int64_t n = 0; n < p.N; ++n) {
      y[n] = std::exp(y[n] - m);
      s += y[n];
    }
    const float each = static_cast<float>(1 / s);
    for (int64_t n = 0; n < p.N; ++n) y[n] *= each;
  }
}
