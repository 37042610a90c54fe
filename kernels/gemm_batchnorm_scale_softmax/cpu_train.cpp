// What train mode needs on a CPU beside the tail: half of x less its mean over the batch, before the
// product; what a block of features of the product says about the batch, after it.
//   half[i,k] = (x[i,k] - total[k] / B) / 2;  var[n] = 4 sum_i z[i,n]^2 / B, since z has mean 0
//   then y = exp(t - m) / s as in eval, t = a z + d
// Who owns what: a call owns rows of half, or strips of features, whose sums stay in L1.
// Moves: x once, half once, 8 B K bytes; z from the cache, where the product has just left it.
// In double: a mean rounded to float32 would cost the digits that centring is to keep. Half of the
//   difference: of two finite floats it is finite, and the factor is exact.
#include <algorithm>

#include "problem.h"

void launch(const Centre& p, int64_t begin, int64_t end) {
  const double each = 1.0 / p.B;
  for (int64_t i = begin; i < end; ++i) {
    float* half = p.half + i * p.K;
    const float* x = p.x + std::min(i, p.B - 1) * p.x_stride;
    if (i < p.B)
      for (int64_t k = 0; k < p.K; ++k)
        half[k] = static_cast<float>((x[k] - p.total[k] * each) * 0.5);
    else
      for (int64_t k = 0; k < p.K; ++k)
        half[k] = k % kMeanRows == i - p.B ? static_cast<float>(p.total[k] * each) : 0;
  }
}

void launch(const Statistics& p, int64_t begin, int64_t end) {
  constexpr int64_t kRows = 4;  // rows together: a sum is loaded and stored once for four
  for (int64_t strip = begin; strip < end; ++strip) {
    const int64_t first = p.first + strip * kStrip, count = std::min(kStrip, p.last - first);
    const float* z = p.z + first;
    double squares[kStrip] = {};
    int64_t i = 0;
    for (; i + kRows <= p.B; i += kRows, z += kRows * p.N)
      for (int64_t k = 0; k < count; ++k) {
        const double a = z[k], b = z[p.N + k], c = z[2 * p.N + k], d = z[3 * p.N + k];
        squares[k] += (a * a + b * b) + (c * c + d * d);
      }
    for (; i < p.B; ++i, z += p.N)
      for (int64_t k = 0; k < count; ++k) squares[k] += static_cast<double>(z[k]) * z[k];
    for (int64_t k = 0; k < count; ++k) {
      double mean = p.bias[first + k];
      for (int64_t row = 0; row < kMeanRows; ++row) mean += z[row * p.N + k];
      p.mean[first + k] = static_cast<float>(mean);
      write_feature(p, first + k, squares[k]);
    }
  }
}
