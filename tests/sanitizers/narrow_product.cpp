#include "narrow_product.h"

#include "common.h"

using driver::Buffer;

void cases() {
  for (const int64_t B : {0, 1, 4, 5, 6, 8, 9, 11})
    for (const int64_t K : {0, 1, 15, 16, 17, 300, 4097})
      for (const int64_t N : {1, 3, 4, 5, 9})
        for (const int64_t gap : {0, 3}) {
          driver::begin_case();
          const Buffer<float> x(B ? (B - 1) * (K + gap) + K : 0), W((N - 1) * (K + gap) + K);
          const auto z = driver::output<float>(B * N);
          const NarrowProduct p{x, W, z, B, K, N, K + gap, K + gap, N};
          driver::in_parts((N + kOutputs - 1) / kOutputs,
                           [&](int64_t begin, int64_t end) { launch(p, begin, end); });
          z.expect_written("z");
        }
}
