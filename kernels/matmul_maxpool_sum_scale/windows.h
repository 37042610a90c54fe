// The windows of a row on a CPU.
#pragma once
#include "problem.h"

// sum_w max_j z[w pool + j]; what is left over of z (N) is dropped.
inline double sum_of_maxima(const float* z, int64_t N, int64_t pool) {
  double sum = 0;
  for (int64_t first = 0; first + pool <= N; first += pool) {
    float top = z[first];
    for (int64_t n = first + 1; n < first + pool; ++n) top = larger(z[n], top);
    sum += top;
  }
  return sum;
}
