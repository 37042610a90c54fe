// z[i,n] = sum_k x[i,k] W[n,k] on a CPU, by tiles that stay in registers over all of k (dot_tiles.h).
// Who owns what: a call owns features, for all rows of x; kOutputs of them go together.
// Moves: W once, 4 N K bytes, from memory, for blocks of it stay in L2 while the rows of x go by, kRows
// at a time, in L1 where they are short. Of a long k one piece after the other, added to z.
#include "narrow_product.h"

#include <algorithm>

#include "dot_tiles.h"

static_assert(kOutputs == kFeatures, "features of a task are those of a tile");

namespace {

// The features [n, n + outs) of all rows, from features k ... k + K of x.
void block(const NarrowProduct& p, int64_t n, int64_t outs, int64_t k, int64_t K) {
  const float *x = p.x + k, *W = p.W + n * p.W_stride + k;
  for (int64_t i = 0; i < p.B; i += kRows, x += kRows * p.x_stride) {
    const Piece piece{x,      W,    p.z + i * p.z_stride + n, K, p.x_stride, p.W_stride, p.z_stride,
                      i == 0, k > 0};
    dots(piece, outs, p.B - i);
  }
}

}  // namespace

void launch(const NarrowProduct& p, int64_t begin, int64_t end) {
  const int64_t last = std::min(end * kOutputs, p.N);
  const int64_t length = piece_of(p.K), together = near_of(p.K, length);
  for (int64_t k = 0; k == 0 || k < p.K; k += length)
    for (int64_t n = begin * kOutputs; n < last; n += together)
      block(p, n, std::min(together, last - n), k, std::min(length, p.K - k));
}
