#include "common.h"
#include "problem.h"

using driver::Buffer;

#if defined(WB_CHAIN)
void one(int64_t B, int64_t K, int64_t N, int64_t pool, int64_t gap) {
  driver::begin_case();
  const Buffer<float> x(driver::strided(B, K, K + gap)), W(N * K), b(N);
  const auto y = driver::output<float>(B);
  const Pooled p{x, W, b, y, B, K, N, pool, K + gap, -0.5};
  driver::in_parts(B, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
  y.expect_written("y");
}
#elif defined(WB_TAIL)
void one(int64_t B, int64_t, int64_t N, int64_t pool, int64_t) {
  driver::begin_case();
  const Buffer<float> z(B * N);
  const auto y = driver::output<float>(B);
  const Pooled p{z, y, B, N, pool, 2.0};
  driver::in_parts(B, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
  y.expect_written("y");
}
#else  // blocks of z, with a pool, and of g, with none
void one(int64_t B, int64_t K, int64_t N, int64_t pool, int64_t gap) {
  for (const int64_t now : {pool, int64_t{0}}) {
    driver::begin_case();
    const Buffer<float> x(driver::strided(B, K, K + gap)), z(driver::strided(B, N, N + gap));
    const Buffer<double> w_sum(K), c(now > 0 ? 0 : N), sums(3 * B);
    const Pooled p{x, w_sum, z, c, sums, B, K, N, now, K + gap, N + gap};
    driver::in_parts(B, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
    sums.expect_written("sums");
  }
}
#endif

void cases() {
  for (const int64_t B : {1, 2, 5})
    for (const int64_t N : {1, 2, 7, 16, 31, 32, 33, 65})
      for (const int64_t K : {0, 1, 15, 31, 32, 33})
        for (const int64_t pool : {1, 2, 3, 7})
          if (pool <= N) one(B, K, N, pool, K % 3);
}
