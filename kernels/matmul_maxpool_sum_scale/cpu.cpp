// Rung 3 on a CPU: half the product, by differences of paired rows, g = x D^T; what is left of it a
// block of columns at a time, while they are in the cache.
//   y[i] = scale / pool (sum_k x[i,k] w_sum[k] + b_sum + sum_m |g[i,m] + c[m]|)
// Who owns what: a call owns rows [begin, end) of a block and adds to their three sums, in double
//   and in a fixed order. What the product has rounded, sum_m |g[i,m]|, is the third: the guard's.
// Moves: the block once, 4 bytes an element, from the cache; x once, with the first block.
// Against rung 2: half of the operations and of the weights' bytes. With a pool above 2 there is no
//   half: the block is one of z, and the maxima of its windows are added.
#include "problem.h"
#include "simd.h"
#include "windows.h"

namespace {

constexpr int kVectors = 4, kStep = kVectors * kDoubles;  // an addition waits for none before

double total(const doubles (&partial)[kVectors]) {
  return sum_lanes((partial[0] + partial[1]) + (partial[2] + partial[3]));
}

double dot(const float* x, const double* w, int64_t K) {
  doubles partial[kVectors] = {};
  const int64_t whole = K - K % kStep;
  for (int64_t k = 0; k < whole; k += kStep)
    for (int v = 0; v < kVectors; ++v)
      partial[v] += widen(x + k + v * kDoubles) * load(w + k + v * kDoubles);
  double sum = total(partial);
  for (int64_t k = whole; k < K; ++k) sum += static_cast<double>(x[k]) * w[k];
  return sum;
}

void magnitudes(const float* g, const double* c, int64_t M, double* sums) {
  doubles of_sums[kVectors] = {}, of_g[kVectors] = {};
  const int64_t whole = M - M % kStep;
  for (int64_t m = 0; m < whole; m += kStep)
    for (int v = 0; v < kVectors; ++v) {
      const doubles value = widen(g + m + v * kDoubles);
      const doubles sum = value + load(c + m + v * kDoubles);
      of_sums[v] += sum < 0 ? -sum : sum;
      of_g[v] += value < 0 ? -value : value;
    }
  sums[1] += total(of_sums);
  sums[2] += total(of_g);
  for (int64_t m = whole; m < M; ++m) {
    sums[1] += std::fabs(g[m] + c[m]);
    sums[2] += std::fabs(static_cast<double>(g[m]));
  }
}

}  // namespace

void launch(const Pooled& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const float* z = p.z + i * p.z_stride;
    double* sums = p.sums + 3 * i;
    sums[0] += dot(p.x + i * p.x_stride, p.w_sum, p.K);
    if (p.pool == 0) magnitudes(z, p.c, p.N, sums);
    if (p.pool > 0) sums[1] += sum_of_maxima(z, p.N, p.pool);
  }
}
