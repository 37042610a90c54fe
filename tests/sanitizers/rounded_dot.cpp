#include "rounded_dot.h"

#include "common.h"

using driver::Buffer;

void one(int64_t B, int64_t K, int64_t stride) {
  driver::begin_case();
  const Buffer<float> x(driver::strided(B, K, stride)), rounded(K);
  const Buffer<double> w(K), b(1);
  const auto y = driver::output<float>(B);
  const RoundedDot p{x, w, rounded, b, y, B, K, stride};
  driver::in_parts(B, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
  y.expect_written("y");
}

void cases() {
  for (const int64_t B : {1, 2, 5, 7, 13})
    for (const int64_t K : {0, 1, 15, 16, 17, 64, 65, 511, 512, 513, 1030})
      for (const int64_t gap : {0, 3}) one(B, K, K + gap);
  one(3, 0, 0);
  one(4, 9, 0);  // one row for all
}
