// mean, c and half of a batch on a CPU. A call owns strips of columns: their mean and centre first
// (batch_centre.h), then the strip is read once more, from L2 where the batch is not too large for it.
// Moves: x once or twice from memory, 4 B K bytes; half, as much.
#include "batch_halves.h"

#include <algorithm>

#include "batch_centre.h"

namespace {

void strip(const BatchHalves& p, int64_t first, int64_t count) {
  const float* x = p.x + first;
  double* mean = p.mean + first;
  centre_of<kStrip>(x, p.x_stride, p.B, count, p.c + first, mean);
  float* half = p.half + first;
  for (int64_t i = 0; i < p.B; ++i, x += p.x_stride, half += p.K)
    halve(x, p.c + first, count, half);
  for (int64_t r = 0; r < p.rows; ++r, half += p.K)
    for (int64_t k = 0; k < count; ++k)
      half[k] = (first + k) / p.run % p.rows == r ? static_cast<float>(mean[k]) : 0.0f;
}

}  // namespace

void launch(const BatchHalves& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) strip(p, i * kStrip, std::min(kStrip, p.K - i * kStrip));
}
