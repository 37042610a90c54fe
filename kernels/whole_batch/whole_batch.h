// Linear -> BatchNorm by the batch's own statistics -> scale -> softmax, all of it, on a CPU: for a
// batch whose output stays in the caches.
//     c[k] = median_g mean_{i of group g} x[i,k],  z[i,n] = sum_k (x[i,k] - c[k]) / 2 W[n,k]
//     shift[n] = -mean_i z[i,n],  a[n] = 2 gamma[n] scale[n] / sqrt(var[n] + eps),
//     d[n] = beta[n] scale[n],  var[n] = 4 var_i z[i,n],  t[i,n] = a[n] (z[i,n] + shift[n]) + d[n],
//     y[i,n] = exp(t[i,n] - max_n t[i,n]) / sum_n exp(...),  mean[n] = sum_k mean_i x[i,k] W[n,k] + b[n]
#pragma once
#include <cstdint>

struct WholeBatch {
  const float *x, *W;                        // (B, K), (N, K), rows x_stride and W_stride apart
  const float *bias, *gamma, *beta, *scale;  // (N); scale (1) where scale_stride is 0
  float *z, *y;                              // (B, N); z may be y
  float *mean, *var;                         // (N) of x W^T + b; the variance is the unbiased one
  float* c;                                  // (K)
  // Scratch: the mean of x (K); (x - c) / 2 (B, K) where `is_short(K)`; the map (N)
  double* mean_x;
  float *half, *shift, *a, *d;
  int64_t B, K, N, x_stride, W_stride, scale_stride;
  double eps;
};

constexpr int64_t kColumns = 64;  // of x: a task of the first step
constexpr int64_t kOutputs = 16;  // features: a task of the second

// Chains of so few additions need not be cut to lanes, whose sums would take longer than they.
constexpr bool is_short(int64_t K) { return K < 256; }

// One after the other: columns of x, features, rows, begin <= i < end of them as tasks.
void take_centre(const WholeBatch& p, int64_t begin, int64_t end);
void take_features(const WholeBatch& p, int64_t begin, int64_t end);
void take_rows(const WholeBatch& p, int64_t begin, int64_t end);
