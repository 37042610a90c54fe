#include "common.h"
#include "problem.h"

using driver::Buffer;

#if defined(WB_CHAIN) || defined(WB_FOLDED)
void one(int64_t B, int64_t K, int64_t stride, int64_t M, double scale) {
  for (const int64_t pool : {1, 3}) {
    driver::begin_case();
    const Buffer<float> x(driver::strided(B, K, stride));
    const auto y = driver::output<float>(B);
    PoolChain p{};
    p.x = x, p.y = y, p.B = B, p.K = K, p.M = M, p.x_stride = stride, p.scale = scale;
#ifdef WB_CHAIN
    const Buffer<float> W(M * pool * K), bias(M * pool);
    p.W = W, p.bias = bias, p.pool = pool;
#else
    const Buffer<float> w(M * K), b(M);
    p.w = w, p.b = b;
#endif
    driver::in_parts(B, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
    y.expect_written("y");
  }
}
#else  // blocks
void one(int64_t B, int64_t K, int64_t stride, int64_t M, double scale) {
  for (const bool both : {false, true})
    for (const int64_t width : {M, (M + 1) / 2}) {
      driver::begin_case();
      const Buffer<float> x(driver::strided(B, K, stride)), w(M * K), b(M);
      const Buffer<double> w_exact(both ? M * K : 0), b_exact(both ? M : 0);
      const auto ends = driver::output<float>(2 * B);
      const auto at = driver::output<int64_t>(2 * B);
      const auto y = driver::output<float>(B);
      PoolChain p{};
      p.x = x, p.w = w, p.b = b, p.y = y, p.B = B, p.K = K, p.M = M, p.x_stride = stride;
      p.w_exact = both ? w_exact.get() : nullptr, p.b_exact = both ? b_exact.get() : nullptr;
      p.scale = scale;
      if (width < M) p.ends = ends, p.at = at;  // one block keeps nothing
      const int made = driver::made;
      for (p.first = 0; p.first < M; p.first += width) {
        driver::made = made;
        p.count = std::min(width, M - p.first);
        const Buffer<float> u(B * p.count);
        p.u = u;
        driver::in_parts(B, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
      }
      y.expect_written("y");
      p.u = nullptr, p.first = 0, p.count = M;  // the kernel multiplies by itself
      driver::in_parts(B, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
      y.expect_written("y");
    }
}
#endif

void cases() {
  for (const double scale : {2.0, -1.5, 0.0})
    for (const int64_t B : {1, 2, 5})
      for (const int64_t M : {1, 2, 7, 15, 16, 17, 33})
        for (const int64_t K : {0, 1, 9, 31, 32, 33, 65}) one(B, K, K + M % 3, M, scale);
}
