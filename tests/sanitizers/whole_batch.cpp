#include "whole_batch.h"

#include "common.h"

using driver::Buffer;

// gap: between rows of x and W. apart: z is kept beside y, and scale is one a feature.
void batch(int64_t B, int64_t K, int64_t N, int64_t gap, bool apart) {
  driver::begin_case();
  const Buffer<float> x((B - 1) * (K + gap) + K), W((N - 1) * (K + gap) + K);
  const Buffer<float> bias(N), gamma(N), beta(N), scale(apart ? N : 1);
  const auto y = driver::output<float>(B * N), z = driver::output<float>(apart ? B * N : 0);
  const auto mean = driver::output<float>(N), var = driver::output<float>(N),
             c = driver::output<float>(K), half = driver::output<float>(is_short(K) ? B * K : 0);
  const auto shift = driver::output<float>(N), a = driver::output<float>(N),
             d = driver::output<float>(N);
  const auto mean_x = driver::output<double>(K);
  WholeBatch p{};
  p.x = x, p.W = W, p.bias = bias, p.gamma = gamma, p.beta = beta, p.scale = scale;
  p.y = y, p.z = apart ? z.get() : y.get(), p.mean = mean, p.var = var, p.c = c;
  p.mean_x = mean_x, p.half = half, p.shift = shift, p.a = a, p.d = d;
  p.B = B, p.K = K, p.N = N, p.x_stride = p.W_stride = K + gap, p.scale_stride = apart,
  p.eps = 1e-5;
  const auto step = [&](int64_t count, int64_t each, auto take) {
    driver::in_parts((count + each - 1) / each,
                     [&](int64_t begin, int64_t end) { take(p, begin, end); });
  };
  step(K, kColumns, take_centre);
  step(N, kOutputs, take_features);
  step(B, 1, take_rows);
  for (const auto* written : {&y, &z, &mean, &var, &c, &half, &shift, &a, &d})
    written->expect_written("an output");
  mean_x.expect_written("mean_x");
}

void cases() {
  for (const int64_t B : {2, 15})
    for (const int64_t K : {1, 65, 129, 255, 257, 301, 4097})
      for (const int64_t N : {1, 17, 49, 213})
        if (K < 4000 || N < 49) batch(B, K, N, B % 2 * 3, N % 3 > 0);
}
