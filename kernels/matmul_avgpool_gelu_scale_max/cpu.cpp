// Rung 3 on a CPU: torch multiplies by the folded weights, a block of features at a time; here, while
// the block is in the cache, each row keeps the two u that can win. After the last block the winner
// is computed once more, in double: the product in float32 only had to find it. A few features are
// multiplied here, all of them in double.
//   u[i,m] = sum_k x[i,k] w[m,k] + b[m];  y[i] = max_m scale * gelu(u[i,m])
// Who owns what: a call owns rows [begin, end) of a block.
// Moves: a block of u, from the cache; once, 12 K bytes a row: x, and the weights of the winner.
// Against rung 2: the product runs at the rate of a library, the maximum by vectors.
#include <cmath>

#include "few.h"
#include "problem.h"
#include "row.h"

namespace {

// y[i] where feature m, of the u found in float32, wins.
float exact(const PoolChain& p, int64_t i, int64_t m) {
  const float* x = p.x + i * p.x_stride;
  const double u = p.w_exact ? dot(x, p.w_exact + m * p.K, p.K) : dot(x, p.w + m * p.K, p.K);
  return static_cast<float>(p.scale * gelu(u + (p.b_exact ? p.b_exact[m] : p.b[m])));
}

// All features are in u.
float from_u(const PoolChain& p, int64_t i) {
  const float* u = p.u + i * p.M;
  const Ends<float> ends = ends_of_row(u, p.M, p.scale < 0);
  const Winner winner = winner_of(ends, p.scale);
  if (!std::isfinite(winner.best)) return static_cast<float>(winner.best);
  return exact(p, i, place_of(winner.is_right ? ends.right : ends.left, u, p.M));
}

void join_block(const PoolChain& p, int64_t i) {
  const bool dips = p.scale < 0;
  const float* u = p.u + i * p.count;
  float* kept = p.ends + 2 * i;
  int64_t* at = p.at + 2 * i;
  const Ends<float> before = p.first ? Ends<float>{kept[0], kept[1]} : no_ends<float>(dips);
  const Ends<float> now = joined(before, ends_of_row(u, p.count, dips), dips);
  if (now.left != before.left) at[0] = p.first + place_of(now.left, u, p.count);
  if (now.right != before.right) at[1] = p.first + place_of(now.right, u, p.count);
  kept[0] = now.left, kept[1] = now.right;
  if (p.first + p.count < p.M) return;
  const Winner winner = winner_of(now, p.scale);
  p.y[i] = std::isfinite(winner.best) ? exact(p, i, at[winner.is_right])
                                      : static_cast<float>(winner.best);
}

}  // namespace

void launch(const PoolChain& p, int64_t begin, int64_t end) {
  int64_t i = begin;
  if (p.count < p.M) {
    for (; i < end; ++i) join_block(p, i);
  } else if (p.u) {
    for (; i < end; ++i) p.y[i] = from_u(p, i);
  } else {
    for (; i + kRows <= end; i += kRows) from_x<kRows>(p, i);
    for (; i < end; ++i) from_x<1>(p, i);
  }
}
