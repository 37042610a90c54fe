// The product itself, without a tail: z goes to memory. The main loop is in common/split_gemm.cuh.
// Who owns what: a block owns 128 x 128 outputs over one part of k; parts are added by who reads z.
// Moves: xh, xl, wh, wl once from memory, 4 K (B + N) bytes; z once, 4 B N bytes a part.
#include "exponent.cuh"
#include "split_gemm.cuh"
#include "split_product.h"

struct Store {
  float* z;
  const int *e, *f;
  int64_t B, N;
  const float *x, *W;  // as they were, for rows of W that halves can't hold
  int64_t K, x_stride, W_stride;

  // z[i,n] as it is written, by the first part: infinities of W have their own rules.
  __device__ __noinline__ float directly(int64_t i, int64_t n) const {
    float sum = 0.f;
    for (int64_t k = 0; k < K && blockIdx.y == 0; ++k)
      sum = fmaf(x[i * x_stride + k], W[n * W_stride + k], sum);
    return sum;
  }

  __device__ __forceinline__ float value(float sum, int64_t i, int64_t n, int exponent) const {
    if (n >= N) return 0.f;
    const int its = f[n];
    return its == kNotFinite && W ? directly(i, n) : raised(sum, exponent + its);
  }

  __device__ __forceinline__ void operator()(const float (&sum)[64], int row, int column) const {
    float* part = z + blockIdx.y * B * N;
    const bool pairs = N % 2 == 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row + 8 * r;
      if (i >= B) continue;
      const int exponent = e[i];
      float* to = part + i * N;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int n = column + 8 * j;
        const float left = value(sum[4 * j + 2 * r], i, n, exponent);
        const float right = value(sum[4 * j + 2 * r + 1], i, n + 1, exponent);
        if (pairs && n < N) {
          *reinterpret_cast<float2*>(to + n) = make_float2(left, right);
        } else {
          if (n < N) to[n] = left;
          if (n + 1 < N) to[n + 1] = right;
        }
      }
    }
  }
};

cudaError_t launch(const SplitProduct& p, cudaStream_t stream) {
  const split_gemm::Halves x{p.xh, p.xl, p.e, p.B}, w{p.wh, p.wl, p.f, p.N};
  const Store tail{p.z, p.e, p.f, p.B, p.N, p.x, p.W, p.K, p.x_stride, p.W_stride};
  return split_gemm::launch(x, w, p.K, static_cast<int>(p.parts), tail, stream);
}
