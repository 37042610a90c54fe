#include "batch_halves.h"

#include "common.h"

using driver::Buffer;

void cases() {
  for (const int64_t B : {1, 2, 4, 5, 11, 43})
    for (const int64_t K : {1, 15, 16, 17, 255, 257, 600})
      for (const int64_t rows : {0, 4})
        for (const int64_t gap : {0, 3}) {
          driver::begin_case();
          const Buffer<float> x((B - 1) * (K + gap) + K);
          const auto half = driver::output<float>((B + rows) * K);
          const auto c = driver::output<float>(K);
          const auto mean = driver::output<double>(K);
          const BatchHalves p{x, half, c, mean, B, K, K + gap, rows, 64};
          driver::in_parts((K + kStrip - 1) / kStrip,
                           [&](int64_t begin, int64_t end) { launch(p, begin, end); });
          half.expect_written("half");
          c.expect_written("c");
          mean.expect_written("mean");
        }
}
