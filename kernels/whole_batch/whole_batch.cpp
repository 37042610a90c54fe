// The whole chain on a batch, in three steps; between two of them all threads wait.
//   take_centre    owns columns of x: their mean and centre; where K is short, their halves
//   take_features  owns features, for the whole batch: the product, what it says about the batch
//   take_rows      owns rows: the softmax
// Moves: x once from memory, W once, y to it. What is between stays in the caches: of a long k the
//   halves are made again for each block of W that stays in L2, kRows rows at a time, and never stored.
#include "whole_batch.h"

#include <algorithm>
#include <cmath>

#include "batch_centre.h"
#include "dot_tiles.h"
#include "outer_tiles.h"
#include "softmax_row.h"

namespace {

constexpr int64_t kWidest = 256;  // columns of x at once: the sums of all groups stay in L1
constexpr int64_t kStrip = 192;   // features whose statistics are taken together: whole panels
static_assert(kStrip % kPanel == 0 && kStrip % kFeatures == 0);

// mean of Features features from n on, in double: a running mean may not err more than torch's, which
// is one of all rows.
template <int Features>
void mean_of(const WholeBatch& p, int64_t n) {
  const float* W = p.W + n * p.W_stride;
  doubles sum[Features] = {};
  const int64_t whole = p.K - p.K % kDoubles;
  for (int64_t k = 0; k < whole; k += kDoubles) {
    const doubles x = load(p.mean_x + k);
#pragma GCC unroll 8
    for (int f = 0; f < Features; ++f) sum[f] += x * widen(W + f * p.W_stride + k);
  }
  for (int f = 0; f < Features; ++f) {
    double total = sum_lanes(sum[f]);
    for (int64_t k = whole; k < p.K; ++k) total += p.mean_x[k] * W[f * p.W_stride + k];
    p.mean[n + f] = static_cast<float>(total + p.bias[n + f]);
  }
}

void means(const WholeBatch& p, int64_t n, int64_t last) {
  for (; n + kFeatures <= last; n += kFeatures) mean_of<kFeatures>(p, n);
  for (; n < last; ++n) mean_of<1>(p, n);
}

// z of features first ... last, by panels of W^T: chains of k one after the other.
void short_product(const WholeBatch& p, int64_t first, int64_t last) {
  alignas(kVectorBytes) float panel[kChain * kPanel];
  const int64_t chains = (p.K + kChain - 1) / kChain;
  const int64_t length = chains > 1 ? (p.K + chains - 1) / chains : kChain;
  for (int64_t n = first; n < last; n += kPanel) {
    const int64_t outs = std::min<int64_t>(kPanel, last - n);
    for (int64_t k = 0; k == 0 || k < p.K; k += length) {
      const int64_t K = std::min(length, p.K - k);
      turn(p.W + n * p.W_stride + k, p.W_stride, outs, K, panel);
      outer_product({p.half + k, panel, p.z + n, p.K, p.N, K, outs, k > 0}, p.B);
    }
    means(p, n, n + outs);
  }
}

// The same by dot products, of halves that are made for a tile of rows.
void long_product(const WholeBatch& p, int64_t first, int64_t last) {
  constexpr int64_t kApart = kLongest + kLineFloats;  // not all rows in one set of L1
  alignas(kVectorBytes) float half[kRows * kApart];
  const int64_t length = piece_of(p.K), together = near_of(p.K, length);
  for (int64_t k = 0; k < p.K; k += length)
    for (int64_t n = first; n < last; n += together) {
      const int64_t K = std::min(length, p.K - k), outs = std::min(together, last - n);
      for (int64_t i = 0; i < p.B; i += kRows) {
        const int64_t there = std::min<int64_t>(kRows, p.B - i);
        for (int64_t r = 0; r < there; ++r)
          halve(p.x + (i + r) * p.x_stride + k, p.c + k, K, half + r * kApart);
        dots({half, p.W + n * p.W_stride + k, p.z + i * p.N + n, K, kApart, p.W_stride, p.N, i == 0,
              k > 0},
             outs, there);
      }
      if (k + length >= p.K) means(p, n, n + outs);
    }
}

// Of features first ... last, from sums over the batch of z - z[0] and of its square, in double: no
// square overflows, and of equal rows the variance is 0. A bias that is not finite makes the batch's
// statistics so.
void statistics(const WholeBatch& p, int64_t first, int64_t last) {
  const int64_t count = last - first;
  const float *top = p.z + first, *z = top;
  double sum[kStrip] = {}, square[kStrip] = {};
  for (int64_t i = 0; i < p.B; ++i, z += p.N)
    for (int64_t k = 0; k < count; ++k) {
      const double from_first = static_cast<double>(z[k]) - top[k];
      sum[k] += from_first;
      square[k] += from_first * from_first;
    }
  for (int64_t k = 0; k < count; ++k) {
    const int64_t n = first + k;
    const double from_first = sum[k] / p.B, var = 4 * (square[k] / p.B - from_first * from_first);
    const double scale = p.scale[n * p.scale_stride];
    const float nothing = p.bias[n] - p.bias[n];
    p.shift[n] = static_cast<float>(-(top[k] + from_first)) + nothing;
    p.a[n] = static_cast<float>(2 * p.gamma[n] * scale / std::sqrt(var + p.eps));
    p.d[n] = static_cast<float>(p.beta[n] * scale);
    p.var[n] = static_cast<float>(var * p.B / (p.B - 1)) + nothing;
  }
}

}  // namespace

void take_centre(const WholeBatch& p, int64_t begin, int64_t end) {
  const int64_t last = std::min(end * kColumns, p.K);
  for (int64_t k = begin * kColumns; k < last; k += kWidest) {
    const int64_t count = std::min(kWidest, last - k);
    centre_of<kWidest>(p.x + k, p.x_stride, p.B, count, p.c + k, p.mean_x + k);
    if (is_short(p.K))
      for (int64_t i = 0; i < p.B; ++i)
        halve(p.x + i * p.x_stride + k, p.c + k, count, p.half + i * p.K + k);
  }
}

void take_features(const WholeBatch& p, int64_t begin, int64_t end) {
  const int64_t last = std::min(end * kOutputs, p.N);
  for (int64_t n = begin * kOutputs; n < last; n += kStrip) {
    const int64_t after = std::min(n + kStrip, last);
    is_short(p.K) ? short_product(p, n, after) : long_product(p, n, after);
    statistics(p, n, after);
  }
}

void take_rows(const WholeBatch& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) softmax_of_row(p, p.z + i * p.N, p.y + i * p.N);
}
