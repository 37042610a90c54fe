// Rung 3 on a CPU: the product comes by blocks of features, and each is reduced while in the cache.
//   a block's (m', s') is merged into its row's (m, s); after the last one, over z in place,
//   y = e^(t-m) / s
// A row that comes as one block is done in place at once, with one exp an element.
// Who owns what: a call owns rows [begin, end); a row goes by pieces that stay in L1.
// Moves: z from the cache, then once more from memory, and y to it: 8 B N bytes, no other matrix.
// Against rung 2: the maximum of a piece before its sum, so that neither waits for an element; exp
//   is a polynomial without branches, 16 at a time.
#include <algorithm>
#include <cmath>

#include "problem.h"
#include "softmax_row.h"

namespace {

struct RowSum {
  double m = kNothing, s = 0;  // s is NaN where t holds a NaN or +inf
};

RowSum with_block(const Tail& p, const float* z, RowSum row) {
  float t[kPiece];
  for (int64_t n = p.first; n < p.last; n += kPiece) {
    const int count = static_cast<int>(std::min<int64_t>(kPiece, p.last - n));
    const int padded = map_piece(p, z + n, n, count, t);
    const double m = std::max<double>(row.m, max_of(t, padded));
    const double from = m == kNothing ? 0 : m;  // -inf - -inf would be NaN
    row.s = row.s * std::exp(row.m - from) + sum_of_exp(t, padded, static_cast<float>(from));
    row.m = m;
  }
  return row;
}

void finish(const Tail& p, float* y, RowSum row) {
  float t[kPiece];
  const float m = static_cast<float>(row.m), each = static_cast<float>(1 / row.s);
  for (int64_t n = 0; n < p.N; n += kPiece) {
    const int count = static_cast<int>(std::min<int64_t>(kPiece, p.N - n));
    map_piece(p, y + n, n, count, t);
    for (int k = 0; k < count; ++k) y[n + k] = exp_of(t[k] - m) * each;
  }
}

}  // namespace

void launch(const Tail& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    float* y = p.y + i * p.N;
    if (p.first == 0 && p.last == p.N) {
      softmax_of_row(p, y, y);
      continue;
    }
    double* kept = p.partial + 2 * i;
    const RowSum row = with_block(p, y, p.first ? RowSum{kept[0], kept[1]} : RowSum{});
    kept[0] = row.m, kept[1] = row.s;
    if (p.last == p.N) finish(p, y, row);
  }
}
