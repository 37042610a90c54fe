#include "common.h"
#include "problem.h"

using driver::Buffer;

void one(int64_t B, int64_t K, int64_t stride, [[maybe_unused]] int64_t N) {
  driver::begin_case();
  const Buffer<float> x(driver::strided(B, K, stride));
  const auto y = driver::output<float>(B);
  SumChain p{};
  p.x = x, p.y = y, p.B = B, p.K = K, p.x_stride = stride;
#ifdef WB_CHAIN
  const Buffer<float> W(N * K), b(N);
  p.W = W, p.b = b, p.N = N;
#else
  const Buffer<double> w_sum(K), b_sum(1);
  p.w_sum = w_sum, p.b_sum = b_sum;
#endif
  driver::in_parts(B, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
  y.expect_written("y");
}

void cases() {
  for (const int64_t B : {1, 2, 5, 7, 13, 19})
    for (const int64_t K : {0, 1, 7, 8, 15, 16, 17, 31, 33, 64, 65, 127, 513})
      for (const int64_t gap : {0, 3}) one(B, K, K + gap, 1 + B % 5);
  one(3, 0, 0, 0);
  one(4, 9, 0, 3);  // one row for all
}
