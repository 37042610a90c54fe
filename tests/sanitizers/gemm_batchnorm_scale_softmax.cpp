#include "common.h"
#include "problem.h"

using driver::Buffer;

void tail(int64_t B, int64_t N, [[maybe_unused]] int64_t width) {
  driver::begin_case();
  const Buffer<float> y(B * N), shift(N), a(N), d(N);
  Tail p{};
  p.y = y, p.shift = shift, p.a = a, p.d = d, p.B = B, p.N = N;
#ifdef WB_BLOCKS
  const auto partial = driver::output<double>(2 * B);
  p.partial = partial;
  for (p.first = 0; p.first < N; p.first = p.last) {
    p.last = std::min(p.first + width, N);
    driver::in_parts(B, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
  }
  if (width < N) partial.expect_written("partial");  // else rows come whole
#else
  driver::in_parts(B, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
#endif
}

#ifdef WB_TRAIN
void statistics(int64_t B, int64_t N, int64_t width, int64_t stride) {
  driver::begin_case();
  const Buffer<float> z(B * N), bias(N), gamma(N), beta(N);
  const Buffer<float> scale(stride ? N : 1);
  const auto shift = driver::output<float>(N), a = driver::output<float>(N),
             d = driver::output<float>(N), var = driver::output<float>(N);
  Statistics p{};
  p.z = z, p.bias = bias, p.gamma = gamma, p.beta = beta, p.scale = scale;
  p.shift = shift, p.a = a, p.d = d, p.var = var;
  p.B = B, p.N = N, p.scale_stride = stride, p.eps = 1e-5;
  for (p.first = 0; p.first < N; p.first = p.last) {
    p.last = std::min(p.first + width, N);
    driver::in_parts((p.last - p.first + kStrip - 1) / kStrip,
                     [&](int64_t begin, int64_t end) { launch(p, begin, end); });
  }
  for (const auto* written : {&shift, &a, &d, &var}) written->expect_written("map");
}
#endif

void cases() {
  for (const int64_t B : {1, 2, 4, 5})
    for (const int64_t N : {1, 2, 7, 15, 16, 17, 255, 256, 257, 511, 512, 513, 1030})
      for (const int64_t width : {N, (N + 1) / 2}) {
        tail(B, N, width);
#ifdef WB_TRAIN
        for (const int64_t stride : {0, 1})
          if (B > 1) statistics(B, N, width, stride);
#endif
      }
}
