#include "pair_fold.h"

#include "common.h"

using driver::Buffer;

void one(int64_t M, int64_t K) {
  driver::begin_case();
  const Buffer<float> W(2 * M * K), bias(2 * M);
  const auto D = driver::output<float>(M * K);
  const auto shifts = driver::output<double>(M), w_sum = driver::output<double>(K),
             b_sum = driver::output<double>(1);
  const PairFold p{W, bias, D, shifts, w_sum, b_sum, M, K};
  driver::in_parts(tasks_of(p), [&](int64_t begin, int64_t end) { take_weights(p, begin, end); });
  take_bias(p);
  D.expect_written("D");
  shifts.expect_written("shifts");
  w_sum.expect_written("w_sum");
  b_sum.expect_written("b_sum");
}

void cases() {
  for (const int64_t M : {0, 1, 3, 8})
    for (const int64_t K : {1, 17, 1025, 17001}) one(M, K);
  one(65, 17008);  // D goes past the caches
}
