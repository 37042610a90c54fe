#include "pair_difference.h"

#include "common.h"

using driver::Buffer;

void one(int64_t M, int64_t K) {
  driver::begin_case();
  const Buffer<float> W(2 * M * K);
  const auto D = driver::output<float>(M * K);
  const auto s = driver::output<double>(K);
  const PairDifference p{W, D, nullptr, s, M, K, 0};
  driver::in_parts((K + kStrip - 1) / kStrip,
                   [&](int64_t begin, int64_t end) { launch(p, begin, end); });
  D.expect_written("D");
  s.expect_written("s");
}

void cases() {
  for (const int64_t M : {0, 1, 2, 3, 7, 8})
    for (const int64_t K : {1, 16, 17, 1023, 1025, 17001}) one(M, K);
  one(65, 17001);  // D has more than one large page
  one(65, 17008);  // and goes past the caches
}
