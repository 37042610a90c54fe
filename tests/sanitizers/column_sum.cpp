#include "column_sum.h"

#include "common.h"

using driver::Buffer;

void one(int64_t N, int64_t K) {
  driver::begin_case();
  const Buffer<float> W(N * K);
  const auto s = driver::output<double>(K);
  const ColumnSum p{W, nullptr, s, N, K, 0};
  driver::in_parts((K + kStrip - 1) / kStrip,
                   [&](int64_t begin, int64_t end) { launch(p, begin, end); });
  s.expect_written("s");
}

void cases() {
  for (const int64_t N : {0, 1, 3, 4, 5, 9, 23})
    for (const int64_t K : {1, 15, 16, 17, 1023, 1024, 1025, 17001}) one(N, K);
}
