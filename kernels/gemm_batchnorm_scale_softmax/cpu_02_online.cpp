// Rung 2 on a CPU: maximum and sum in one walk, online; a second walk writes.
//   (m, s) and an element t merge to (t, s e^(m-t) + 1) if t > m, else to (m, s + e^(t-m))
// Who owns what: a call owns rows [begin, end), one at a time, after the whole product is there.
// Moves: the row twice in, once out: y = e^(t-m) / s.
// Against rung 1: one walk less, two exp an element instead of one: no gain where the row is in the
//   cache. The merge is what lets a row come in blocks.
#include <cmath>

#include "problem.h"
#include "softmax_row.h"

void launch(const Tail& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    float* y = p.y + i * p.N;
    float m = kNothing;
    double s = 0;
    for (int64_t n = 0; n < p.N; ++n) {
      const float t = mapped(p, n, y[n]);
      if (t > m) {
        s = s * std::exp(m - t) + std::exp(t - t);  // 1; NaN for +inf
        m = t;
      } else if (t != kNothing) {
        s += std::exp(t - m);  // a NaN comes here and stays
      }
    }
    const float each = static_cast<float>(1 / s);
    for (int64_t n = 0; n < p.N; ++n) y[n] = std::exp(mapped(p, n, y[n]) - m) * each;
  }
}
