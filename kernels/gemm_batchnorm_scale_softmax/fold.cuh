// Eval mode's map from the running statistics, in one launch.
//   shift = bias - mean;  a = gamma scale / sqrt(var + eps);  d = beta scale, in double, rounded once
// Who owns what: a thread owns a feature.
#pragma once
#include "problem.h"

constexpr int kFoldThreads = 128;

static __global__ void __launch_bounds__(kFoldThreads) fold_kernel(Fold p) {
  const int64_t n = blockIdx.x * static_cast<int64_t>(kFoldThreads) + threadIdx.x;
  if (n >= p.N) return;
  const double kappa = p.scale[n * p.scale_stride];
  p.shift[n] = static_cast<float>(static_cast<double>(p.bias[n]) - p.mean[n]);
  p.a[n] = static_cast<float>(p.gamma[n] * kappa / sqrt(p.var[n] + p.eps));
  p.d[n] = static_cast<float>(p.beta[n] * kappa);
}

cudaError_t launch(const Fold& p, cudaStream_t stream) {
  const int64_t blocks = (p.N + kFoldThreads - 1) / kFoldThreads;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;  // the grid's limit in x
  fold_kernel<<<static_cast<unsigned>(blocks), kFoldThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
