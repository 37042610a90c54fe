// A control: rows taken two at a time, and the last one of an odd number forgotten, which leaves the
// matrix product in its place. Kept to see `check` reject it: the batch of the benchmark is even.
#include <cmath>

#include "problem.h"
#include "softmax_row.h"

void launch(const Tail& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i + 1 < end; i += 2)
    for (float* y : {p.y + i * p.N, p.y + (i + 1) * p.N}) {
      float m = kNothing;
      double s = 0;
      for (int64_t n = 0; n < p.N; ++n) m = std::max(m, y[n] = mapped(p, n, y[n]));
      for (int64_t n = 0; n < p.N; ++n) s += y[n] = std::exp(y[n] - m);
      for (int64_t n = 0; n < p.N; ++n) y[n] = static_cast<float>(y[n] / s);
    }
}
