#include "sum_fold.h"

#include "common.h"

using driver::Buffer;

void cases() {
  for (const int64_t N : {0, 1, 9, 130})
    for (const int64_t K : {1, 7, 17, 4095, 4097})
      for (const int64_t slices : {1, 2, 3}) {
        if (N * K > 50000 && slices != 2) continue;
        driver::begin_case();
        const Buffer<float> W(N * K), bias(N);
        const auto sum = driver::output<double>(slices * K),
                   squares = driver::output<double>(slices * ((K + kColumns - 1) / kColumns)),
                   w_sum = driver::output<double>(K), b_sum = driver::output<double>(1);
        const auto rounded = driver::output<float>(K);
        const SumFold p{W, bias, sum, squares, w_sum, b_sum, rounded, N, K, slices};
        driver::in_parts(tasks_of(p), [&](int64_t begin, int64_t end) { add_rows(p, begin, end); });
        finish(p);
        sum.expect_written("sum");
        squares.expect_written("squares");
        w_sum.expect_written("w_sum");
        b_sum.expect_written("b_sum");
        rounded.expect_written("rounded");
      }
}
