// Rung 3 on a CPU: torch multiplies by the folded weights, a block of features at a time; here, while
// the block is in the cache, each row keeps the two u that can win. After the last block the winner
// is computed again, in double: the product in float32 only had to find it.
//   u[i,m] = sum_k x[i,k] w[m,k] + b[m];  y[i] = max_m scale * gelu(u[i,m])
// Who owns what: a call owns rows [begin, end) of a block.
// Moves: a block of u, from the cache; once, x and a row of w for each row of x: 8 B K bytes.
// Against rung 2: the product runs at the rate of a library, the maximum by vectors.
#include "gelu.h"
#include "problem.h"
#include "simd.h"

namespace {

typedef float floats __attribute__((vector_size(kVectorBytes)));
typedef float unaligned __attribute__((vector_size(kVectorBytes), aligned(4)));
constexpr int kFloats = kVectorBytes / sizeof(float), kSums = 4;

Ends<float> ends_of_row(const float* u, int64_t count, bool dips) {
  Ends<floats> lanes = no_ends<floats>(dips);
  const int64_t whole = count - count % kFloats;
  for (int64_t m = 0; m < whole; m += kFloats) {
    const floats v = *reinterpret_cast<const unaligned*>(u + m);
    lanes = joined(lanes, ends_of(v, dips), dips);
  }
  Ends<float> ends = no_ends<float>(dips);
  for (int l = 0; l < kFloats; ++l) ends = joined(ends, {lanes.left[l], lanes.right[l]}, dips);
  for (int64_t m = whole; m < count; ++m) ends = joined(ends, ends_of(u[m], dips), dips);
  return ends;
}

int64_t place_of(float value, const float* u, int64_t count) {
  int64_t m = 0;
  while (m < count - 1 && u[m] != value) ++m;
  return m;
}

double dot(const float* x, const float* w, int64_t K) {
  doubles sum[kSums] = {};
  const int64_t whole = K - K % (kSums * kDoubles);
  for (int64_t k = 0; k < whole; k += kSums * kDoubles)
    for (int s = 0; s < kSums; ++s)
      sum[s] += widen(x + k + s * kDoubles) * widen(w + k + s * kDoubles);
  double total = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
  for (int64_t k = whole; k < K; ++k) total += static_cast<double>(x[k]) * w[k];
  return total;
}

float exact(const PoolChain& p, int64_t i, Ends<float> ends) {
  const double left = scaled(ends.left, p.scale), right = scaled(ends.right, p.scale);
  const double best = larger(left, right);
  if (!(best - best == 0)) return static_cast<float>(best);  // NaN and infinities stay
  const int64_t m = p.at[2 * i + (right >= left)];
  return static_cast<float>(p.scale * gelu(dot(p.x + i * p.x_stride, p.w + m * p.K, p.K) + p.b[m]));
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
