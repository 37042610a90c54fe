// Rung 3 on a CPU: torch multiplies by the folded weights, a block of features at a time; here, while
// the block is in the cache, each row keeps the two u that can win. After the last block the winner
// is computed once more, in double: the product in float32 only had to find it.
//   u[i,m] = sum_k x[i,k] w[m,k] + b[m];  y[i] = max_m scale * gelu(u[i,m])
// Who owns what: a call owns rows [begin, end) of a block.
// Moves: a block of u, from the cache; once, 12 K bytes a row: x, and the weights of the winner.
// Against rung 2: the product runs at the rate of a library, the maximum by vectors.
#include "problem.h"
#include "row.h"

namespace {

int64_t place_of(float value, const float* u, int64_t count) {
  int64_t m = 0;
  while (m < count - 1 && u[m] != value) ++m;
  return m;
}

float exact(const PoolChain& p, int64_t i, Ends<float> ends) {
  const double left = scaled(ends.left, p.scale), right = scaled(ends.right, p.scale);
  const double best = larger(left, right);
  if (!(best - best == 0)) return static_cast<float>(best);  // NaN and infinities stay
  const int64_t m = p.at[2 * i + (right >= left)];
  const float* x = p.x + i * p.x_stride;
  const double u = p.w_exact ? dot(x, p.w_exact + m * p.K, p.K) : dot(x, p.w + m * p.K, p.K);
  return static_cast<float>(p.scale * gelu(u + (p.b_exact ? p.b_exact[m] : p.b[m])));
}

}  // namespace

void launch(const PoolChain& p, int64_t begin, int64_t end) {
  const bool dips = p.scale < 0;
  for (int64_t i = begin; i < end; ++i) {
    const float* u = p.u + i * p.count;
    float* kept = p.ends + 2 * i;
    const Ends<float> before = p.first ? Ends<float>{kept[0], kept[1]} : no_ends<float>(dips);
    const Ends<float> now = joined(before, ends_of_row(u, p.count, dips), dips);
    if (now.left != before.left) p.at[2 * i] = p.first + place_of(now.left, u, p.count);
    if (now.right != before.right) p.at[2 * i + 1] = p.first + place_of(now.right, u, p.count);
    kept[0] = now.left, kept[1] = now.right;
    if (p.first + p.count == p.M) p.y[i] = exact(p, i, now);
  }
}
