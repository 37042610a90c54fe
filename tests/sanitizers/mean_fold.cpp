#include "mean_fold.h"

#include "common.h"

using driver::Buffer;

void cases() {
  for (const int64_t groups : {1, 2, 7})
    for (const int64_t pool : {1, 2, 3, 16})
      for (const int64_t K : {1, 17, 1023, 1025, 9001}) {
        driver::begin_case();
        const Buffer<float> W(groups * pool * K), bias(groups * pool);
        const auto w = driver::output<float>(groups * K), b = driver::output<float>(groups);
        const auto w_exact = driver::output<double>(groups * K),
                   b_exact = driver::output<double>(groups);
        const MeanFold p{W, bias, w, b, w_exact, b_exact, K, groups, pool};
        driver::in_parts(tasks_of(p),
                         [&](int64_t begin, int64_t end) { take_weights(p, begin, end); });
        take_bias(p);
        w.expect_written("w");
        b.expect_written("b");
        w_exact.expect_written("w_exact");
        b_exact.expect_written("b_exact");
      }
}
