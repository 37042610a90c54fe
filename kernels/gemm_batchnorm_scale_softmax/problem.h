// Linear -> BatchNorm -> scale -> softmax over the features, around the matrix product z = x W^T.
//
//     map      t[i,n] = a[n] (z[i,n] + shift[n]) + d[n]
//     reduce   m[i] = max_n t[i,n],  s[i] = sum_n exp(t[i,n] - m[i])
//     finish   y[i,n] = exp(t[i,n] - m[i]) / s[i]
//
// eval: shift = b - mean, a = gamma scale / sqrt(var + eps), d = beta scale.
// train: z is the product of half = (x - c) / 2 for a centre c of the batch, in which neither b nor c
//   is seen any more; shift = -mean_i z, a = 2 gamma scale / sqrt(var + eps), var = 4 var_i z.
//
// This header is all that the binding, the launchers and the kernels share. No torch in it.
#pragma once
#include <cmath>
#include <cstdint>

struct Tail {
  float* y;            // (B, N) contiguous: z before, y after
  const float* shift;  // (N)
  const float* a;      // (N)
  const float* d;      // (N)
  int64_t B, N;
#ifdef WB_BLOCKS  // z comes by blocks: features [first, last) are new, none is missing at N
  int64_t first, last;
  double* partial;  // (B, 2): m and s of each row before `first`
#endif
#ifdef WB_TILES    // a row is reduced by tiles
  int64_t tiles;   // ceil(N / kTile)
  float* partial;  // (B, tiles, 2): m and s of each tile
#endif
};

#ifdef WB_TILES
constexpr int64_t kTile = 1024;  // features
#endif

#ifdef WB_TRAIN
// The map of a batch, and its unbiased variance, which the running one moves by.
struct Statistics {
  const float* z;                            // (B, N) contiguous
  const float *bias, *gamma, *beta, *scale;  // (N); scale (1) where scale_stride is 0
  float *shift, *a, *d, *var;                // (N)
  int64_t B, N, scale_stride;
  double eps;
#ifdef WB_CUDA
  int64_t slices;   // of the batch
  double* partial;  // (slices, 2, N): sums of z - z[0] and of its square
#else
  int64_t first, last;  // features of this call
#endif
};

#ifdef __CUDACC__
#define WB_BOTH __host__ __device__
#else
#define WB_BOTH
#endif

// Feature n from the sums over the batch of z - z[0,n] and of its square, in double. A bias that is
// not finite makes the batch's statistics so.
WB_BOTH inline void write_feature(const Statistics& p, int64_t n, double sum, double square) {
  const double from_first = sum / p.B, var = 4 * (square / p.B - from_first * from_first);
  const double scale = p.scale[n * p.scale_stride];
  const float nothing = p.bias[n] - p.bias[n];
  p.shift[n] = static_cast<float>(-(p.z[n] + from_first)) + nothing;
  p.a[n] = static_cast<float>(2 * p.gamma[n] * scale / sqrt(var + p.eps));
  p.d[n] = static_cast<float>(p.beta[n] * scale);
  p.var[n] = static_cast<float>(var * p.B / (p.B - 1)) + nothing;
}
#endif

#ifdef WB_CUDA
#include <cuda_runtime.h>
// A rung of the ladder defines these; each returns the error of its launch.
cudaError_t launch(const Tail& p, cudaStream_t stream);
#ifdef WB_TILES
// The map of the running statistics, derived in double and rounded once.
struct Fold {
  const float *bias, *gamma, *beta, *mean, *var, *scale;  // (N); scale (1) where scale_stride is 0
  float *shift, *a, *d;                                   // (N)
  int64_t N, scale_stride;
  double eps;
};
cudaError_t launch(const Fold& p, cudaStream_t stream);
#endif
#ifdef WB_TRAIN
// mean (N) <- W (N, K), rows W_stride apart, times total (K) / B, plus bias.
struct Mean {
  const float *W, *bias;
  const double* total;  // the sum of x over the batch
  float* mean;
  int64_t B, K, N, W_stride;
};
cudaError_t launch(const Mean& p, cudaStream_t stream);

// total (K) <- the sum of x over the batch; c (K) <- the median of the means of its groups.
struct Centre {
  const float* x;   // (B, K), rows x_stride apart
  double* partial;  // (groups kCentreSlices + 1, K)
  double* total;
  float* c;
  int64_t B, K, x_stride, rows;  // rows of a group
  int groups;                    // at most kGroups
};
constexpr int kGroups = 5, kCentreSlices = 4;
cudaError_t launch(const Centre& p, cudaStream_t stream);
cudaError_t launch(const Statistics& p, cudaStream_t stream);
#endif
#else
// A CPU rung defines these, for rows or strips begin <= i < end, called from several threads.
void launch(const Tail& p, int64_t begin, int64_t end);
#ifdef WB_TRAIN
constexpr int64_t kStrip = 256;  // features whose sums are taken together
void launch(const Statistics& p, int64_t begin, int64_t end);  // strips of them
#endif
#endif
