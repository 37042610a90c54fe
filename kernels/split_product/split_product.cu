// The product itself, without a tail: z goes to memory. The main loop is in common/split_gemm.cuh.
// Who owns what: a block owns 128 x 256 outputs, or 128 x 128, over one part of k; parts are added by
//   who reads z.
// Moves: once from memory, x as halves or as it is, 4 B K bytes, and W's halves, 4 N K, both half of it
//   for one product of halves; or x and W as they are; z once, 4 B N bytes a part.
#include "split_launch.cuh"
#include "split_product.h"

struct Store {
  float* z;
  int64_t B, N;
  const float *x, *W;  // as they were, for rows of W that halves can't hold
  int64_t K, x_stride, W_stride;

  // From a column on that is even.
  struct Row {
    float* to;   // null outside
    int64_t left;  // columns
    bool even;

    template <bool Whole>
    __device__ __forceinline__ void give(int c, float value, float next) const {
      if (!Whole && (to == nullptr || c >= left)) return;
      if (Whole || even) {
        *reinterpret_cast<float2*>(to + c) = make_float2(value, next);
      } else {
        to[c] = value;
        if (c + 1 < left) to[c + 1] = next;
      }
    }
  };

  __device__ __forceinline__ Row row(int i, int n) const {
    return {i < B ? z + (blockIdx.y * B + i) * N + n : nullptr, N - n, N % 2 == 0};
  }

  template <int Columns>
  __device__ __forceinline__ bool holds(int row, int column) const {
    return row + split_gemm::kRows <= B && column + Columns <= N && N % 2 == 0;
  }

  // Columns whose weights are not all finite, as they are written: infinities have their own rules.
  // They go into the first part whole.
  template <int Columns>
  __device__ __noinline__ void again(const int* f, int row, int column) const {
    for (int c = 0; c < Columns && column + c < N; ++c)
      for (int t = threadIdx.x - hopper::kWarpgroup; f[c] == kNotFinite && t < split_gemm::kRows;
           t += split_gemm::kMultipliers * hopper::kWarpgroup) {
        const int64_t i = row + t, n = column + c;
        if (i >= B) break;
        float sum = 0.f;
        for (int64_t k = 0; k < K && blockIdx.y == 0; ++k)
          sum = fmaf(x[i * x_stride + k], W[n * W_stride + k], sum);
        z[(blockIdx.y * B + i) * N + n] = sum;
      }
  }

  template <int Columns>
  __device__ __forceinline__ void finish(const int* f, int row, int column) const {
    const int t = threadIdx.x - hopper::kWarpgroup;
    if (W != nullptr && hopper::any<3>(t < Columns && f[t] == kNotFinite))
      again<Columns>(f, row, column);
  }
};

template <int Products>
static cudaError_t launch_halves(const SplitProduct& p, const Store& tail, cudaStream_t stream) {
  const split_gemm::Halves w{p.wh, p.wl, p.f, p.N};
  const int parts = static_cast<int>(p.parts), promote = static_cast<int>(p.promote);
  if (p.xh == nullptr)
    return split_gemm::launch<Products>({p.x, p.B, p.x_stride}, p.c, w, p.K, parts, tail, stream);
  const split_gemm::Halves x{p.xh, p.xl, p.e, p.B};
  return split_gemm::launch<Products>(x, w, p.K, parts, promote, tail, stream);
}

cudaError_t launch(const SplitProduct& p, cudaStream_t stream) {
  Store tail{p.z, p.B, p.N, p.x, p.W, p.K, p.x_stride, p.W_stride};
  if (p.wh == nullptr) {
    tail.W = nullptr;  // TF32 holds infinities
    const split_gemm::Raw x{p.x, p.B, p.x_stride}, w{p.W, p.N, p.W_stride};
    return split_gemm::launch(x, w, p.K, static_cast<int>(p.parts), tail, stream);
  }
  return p.wl == nullptr ? launch_halves<1>(p, tail, stream) : launch_halves<3>(p, tail, stream);
}
