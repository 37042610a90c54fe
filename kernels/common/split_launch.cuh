// Launching a product of halves: the copy engine's view of the matrices, the grid, shared memory.
#pragma once
#include "dependent_launch.cuh"
#include "split_gemm.cuh"

namespace split_gemm {

// hi and lo in half by panels, (2 pairs, rows rounded up to 8, 32), swizzled: of row r the 16 bytes c
// stand at c ^ (r / 2 % 4). 2^exponents[row] times their sum. One product reads no lo.
struct Halves {
  const half *hi, *lo;
  const int* exponents;
  int64_t rows;
};

// Rows `stride` apart, both of 16 bytes.
struct Raw {
  const float* x;
  int64_t rows, stride;
};

// The driver's own function, found at run time: no library beside the runtime is linked.
inline auto encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult how;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &how);
    const bool there = error == cudaSuccess && how == cudaDriverEntryPointSuccess;
    return there ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function) : nullptr;
  }();
  return found;
}

// Halves by boxes of `box` rows of a panel, eight of them, 512 bytes, a row of the copy engine's,
// which takes long rows faster. What lies outside is 0.
inline bool describe(CUtensorMap& map, const half* matrix, int64_t rows, int pairs, int box) {
  constexpr int kLong = 8 * kPanel;
  const cuuint64_t height = static_cast<cuuint64_t>(rows + 7) / 8, bytes = kLong * sizeof(half);
  const cuuint64_t sizes[] = {kLong, height, 2 * static_cast<cuuint64_t>(pairs)};
  const cuuint64_t strides[] = {bytes, bytes * height};
  const cuuint32_t boxes[] = {kLong, static_cast<cuuint32_t>(box / 8), 1}, steps[] = {1, 1, 1};
  return encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, const_cast<half*>(matrix), sizes,
                   strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Raw rows by boxes of a panel of `box` of them, swizzled by the copy engine, and rounded to TF32 where
// they are multiplied as they are.
inline bool describe(CUtensorMap& map, const Raw& x, int64_t K, int box, bool rounded) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(K), static_cast<cuuint64_t>(x.rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(x.stride) * sizeof(float)};
  const cuuint32_t boxes[] = {kPanel, static_cast<cuuint32_t>(box)}, steps[] = {1, 1};
  const auto type = rounded ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  return encoder()(&map, type, 2, const_cast<float*>(x.x), sizes,
                   strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class Way, class Tail>
cudaError_t launch_tiles(Operands& p, int64_t rows, int64_t columns, int parts, const Tail& tail,
                         cudaStream_t stream) {
  p.B = static_cast<int>(rows), p.N = static_cast<int>(columns);
  const auto kernel = split_gemm_kernel<Way, Tail>;
  constexpr int kShared = sizeof(Shared<Way>);
  static_assert(kShared <= 227 << 10, "what a block may have");
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  const int64_t down = (rows + kRows - 1) / kRows;
  const int64_t across = (columns + Way::Columns - 1) / Way::Columns;
  if (down * across > INT32_MAX || parts > 65535) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(down * across), static_cast<unsigned>(parts));
  return launch_dependent(kernel, grid, kThreads, kShared, stream, p, tail);
}

template <class Way, class Tail>
cudaError_t launch(Operands& p, const Halves& w, int64_t rows, int parts, const Tail& tail,
                   cudaStream_t stream) {
  constexpr bool kBoth = Way::Products == 3;
  p.f = w.exponents;
  if (!describe(p.wh, w.hi, w.rows, p.pairs, Way::Columns) ||
      (kBoth && !describe(p.wl, w.lo, w.rows, p.pairs, Way::Columns)))
    return cudaErrorInvalidValue;
  return launch_tiles<Way>(p, rows, w.rows, parts, tail, stream);
}

inline int pairs_of(int64_t K) { return static_cast<int>((K + 2 * kPanel - 1) / (2 * kPanel)); }

// promote: of 64 of k, what tensor cores accumulate: 1; more, of three products; 0, of one, for all.
template <int Products, class Tail>
cudaError_t launch(const Halves& x, const Halves& w, int64_t K, int parts, int promote,
                   const Tail& tail, cudaStream_t stream) {
  if (encoder() == nullptr) return cudaErrorNotSupported;
  Operands p = {};
  p.pairs = pairs_of(K), p.e = x.exponents, p.promote = promote;
  if (!describe(p.x, x.hi, x.rows, p.pairs, kRows) ||
      (Products == 3 && !describe(p.xl, x.lo, x.rows, p.pairs, kRows)))
    return cudaErrorInvalidValue;
  if constexpr (Products == 3) {
    if (promote > 1) return launch<Way<128, kHalves, 3>>(p, w, x.rows, parts, tail, stream);
  } else if (promote == 0) {
    return launch<Way<256, kHalves, 1, true>>(p, w, x.rows, parts, tail, stream);
  }
  return launch<Way<256, kHalves, Products>>(p, w, x.rows, parts, tail, stream);
}

// c: an exponent a column of x, padded to 64.
template <int Products, class Tail>
cudaError_t launch(const Raw& x, const int8_t* c, const Halves& w, int64_t K, int parts,
                   const Tail& tail, cudaStream_t stream) {
  if (encoder() == nullptr) return cudaErrorNotSupported;
  Operands p = {};
  p.pairs = pairs_of(K), p.c = c;
  if (!describe(p.x, x, K, kRows, false)) return cudaErrorInvalidValue;
  return launch<Way<128, kRawX, Products>>(p, w, x.rows, parts, tail, stream);
}

// Both sides as they are, rounded to TF32 on their way.
template <class Tail>
cudaError_t launch(const Raw& x, const Raw& w, int64_t K, int parts, const Tail& tail,
                   cudaStream_t stream) {
  using Floats = Way<128, kFloats, 1, true>;
  if (encoder() == nullptr) return cudaErrorNotSupported;
  Operands p = {};
  p.pairs = pairs_of(K);
  if (!describe(p.x, x, K, kRows, true) || !describe(p.wh, w, K, Floats::Columns, true))
    return cudaErrorInvalidValue;
  return launch_tiles<Floats>(p, x.rows, w.rows, parts, tail, stream);
}

}  // namespace split_gemm
