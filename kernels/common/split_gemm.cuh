// z = x W^T in float32's accuracy on the tensor cores of a Hopper GPU, for any tail.
//   x[i,k] = 2^e[i] (xh[i,k] + xl[i,k]),  W[n,k] = 2^f[n] (wh[n,k] + wl[n,k]),  h and l in half
//   z[i,n] = 2^(e[i] + f[n]) sum_k (xh wl + xl wh + xh wh)[k]
// A tensor core rounds what it accumulates toward zero, in every instruction. So it accumulates over
// 64 of k only, small terms first, and the sum of these goes on in ordinary float32 registers, that
// round to nearest ("promotion").
// Who owns what: a block owns a tile of 128 x 256 outputs, over one part of k. One thread asks the copy
//   engine for panels of the four matrices, kStages ahead. Two warpgroups own 64 rows each and
//   multiply, 128 columns after the other 128. They take turns: while one promotes, waits and begins
//   again, the other's products run.
// Moves: a block reads 1536 bytes of L2 for each of k. Blocks with the same columns run side by side,
//   so that W comes from memory once.
#pragma once
#include "exponent.cuh"
#include "hopper.cuh"

namespace split_gemm {

constexpr int kRows = 128, kColumns = 256, kPanel = 32;  // of a block's tile; of k in a panel
constexpr int kWide = 128, kTurns = kColumns / kWide;    // columns of one instruction; of a pair
constexpr int kMultipliers = 2, kThreads = (1 + kMultipliers) * hopper::kWarpgroup;
constexpr int kStages = 4, kStep = 16;  // of k in one instruction

struct Stage {  // a panel of each matrix
  half xh[kRows][kPanel], xl[kRows][kPanel], wh[kColumns][kPanel], wl[kColumns][kPanel];
};
static_assert(sizeof(half[kRows][kPanel]) % 1024 == 0, "matrices start where the swizzle does");

struct Shared {
  Stage stages[kStages];
  uint64_t full[kStages], empty[kStages];
  int e[kRows], f[kColumns];  // exponents of the tile's rows and columns
};
constexpr int kShared = sizeof(Shared) + 1024;  // room to start at 1024 bytes

// The four matrices as the copy engine sees them, and how far k goes.
struct Operands {
  CUtensorMap xh, xl, wh, wl;
  const int *e, *f;
  int B, N, pairs;  // of panels: what a tensor core accumulates; the last filled up with zeros
};

// Of a block: the first row and column of its tile, its first pair of panels and how many.
struct Place {
  int row, column, first, pairs;
};

__device__ __forceinline__ Place place_of(const Operands& p) {
  const int down = (p.B + kRows - 1) / kRows;  // tiles that share columns
  const int64_t parts = gridDim.y, part = blockIdx.y;
  const int first = static_cast<int>(p.pairs * part / parts);
  const int last = static_cast<int>(p.pairs * (part + 1) / parts);
  const int row = blockIdx.x % down, column = blockIdx.x / down;
  return {row * kRows, column * kColumns, first, last - first};
}

// One thread of the block: fills stage after stage, as soon as all that read it are done with it.
__device__ __forceinline__ void copy_panels(Shared& shared, const Operands& p, const Place& at) {
  constexpr int kLong = 8;  // rows of a matrix in a row of the copy engine's
  const int row = at.row / kLong, column = at.column / kLong;
  for (int i = 0; i < 2 * at.pairs; ++i) {
    const int s = i % kStages, panel = 2 * at.first + i;
    hopper::wait(&shared.empty[s], (i / kStages + 1) % 2);
    hopper::expect(&shared.full[s], sizeof(Stage));
    Stage& stage = shared.stages[s];
    hopper::load_box(stage.xh, p.xh, row, panel, &shared.full[s]);
    hopper::load_box(stage.wl, p.wl, column, panel, &shared.full[s]);
    hopper::load_box(stage.xl, p.xl, row, panel, &shared.full[s]);
    hopper::load_box(stage.wh, p.wh, column, panel, &shared.full[s]);
  }
}

// part (64, 128) <- or += x (64, 32) w (128, 32)^T.
__device__ __forceinline__ void multiply_panel(float (&part)[64], const half (*x)[kPanel],
                                               const half (*w)[kPanel], bool add) {
  const uint64_t a = hopper::rows_of_32(x), b = hopper::rows_of_32(w);
  constexpr int kNext = kStep * sizeof(half) >> 4;  // in a descriptor's unit
#pragma unroll
  for (int k = 0; k < kPanel / kStep; ++k)
    hopper::multiply(part, a + k * kNext, b + k * kNext, add || k > 0);
}

// part (64, 128) <- the three products of a pair of panels: rows from m, columns from n on. At the
// end the other warpgroup's turn is over the last of them: they keep the tensor cores busy meanwhile.
__device__ __forceinline__ void multiply_pair(float (&part)[64], const Stage* pair, int m, int n,
                                              int mine) {
  hopper::take_turn(mine);
  hopper::fence_products();
  multiply_panel(part, pair[0].xh + m, pair[0].wl + n, false);
  multiply_panel(part, pair[1].xh + m, pair[1].wl + n, true);
  multiply_panel(part, pair[0].xl + m, pair[0].wh + n, true);
  multiply_panel(part, pair[1].xl + m, pair[1].wh + n, true);
  hopper::commit_products();
  multiply_panel(part, pair[0].xh + m, pair[0].wh + n, true);
  multiply_panel(part, pair[1].xh + m, pair[1].wh + n, true);
  hopper::commit_products();
  hopper::wait_products<1>();
  hopper::pass_turn(3 - mine);
  hopper::wait_products<0>();
}

// sums (64, 256) <- this warpgroup's outputs, without the exponents.
__device__ __forceinline__ void multiply_panels(float (&sums)[kTurns][64], Shared& shared,
                                                const Place& at) {
  const int mine = threadIdx.x / hopper::kWarpgroup, lane = threadIdx.x % 32;
  if (mine == 2) hopper::pass_turn(1);
#pragma unroll
  for (int h = 0; h < kTurns; ++h)
#pragma unroll
    for (int j = 0; j < 64; ++j) sums[h][j] = 0.f;
  float part[64];
  for (int i = 0; i < at.pairs; ++i) {
    const int s = 2 * i % kStages, parity = 2 * i / kStages % 2;
    hopper::wait(&shared.full[s], parity);
    hopper::wait(&shared.full[s + 1], parity);
#pragma unroll
    for (int h = 0; h < kTurns; ++h) {
      multiply_pair(part, shared.stages + s, (mine - 1) * 64, h * kWide, mine);
      if (h + 1 == kTurns && lane == 0) {  // this warp has read them
        hopper::arrive(&shared.empty[s]);
        hopper::arrive(&shared.empty[s + 1]);
      }
#pragma unroll
      for (int j = 0; j < 64; ++j) sums[h][j] += part[j];
    }
  }
}

__device__ __forceinline__ void init_barriers(Shared& shared) {
  for (int s = 0; s < kStages; ++s) {
    hopper::init(&shared.full[s], 1);
    hopper::init(&shared.empty[s], kMultipliers * hopper::kWarpgroup / 32);  // warps
  }
  hopper::fence_init();
}

// By the multiplying threads: read early, for at the end each would wait for memory.
__device__ __forceinline__ void take_exponents(Shared& shared, const Operands& p, const Place& at) {
  const int t = threadIdx.x - hopper::kWarpgroup;
  static_assert(kColumns == kMultipliers * hopper::kWarpgroup, "a column a thread");
  shared.f[t] = at.column + t < p.N ? p.f[at.column + t] : 0;
  if (t < kRows) shared.e[t] = at.row + t < p.B ? p.e[at.row + t] : 0;
}

// Hands the outputs of this thread over, two neighbours of a row at a time.
template <class Tail>
__device__ __forceinline__ void hand_over(const float (&sums)[kTurns][64], const Shared& shared,
                                          const Place& at, const Tail& tail) {
  const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = 16 * warp + lane / 4 + 8 * r, exponent = shared.e[i];
#pragma unroll
    for (int h = 0; h < kTurns; ++h)
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int n = h * kWide + 8 * j + lane % 4 * 2;
        tail(at.row + i, at.column + n, raised(sums[h][4 * j + 2 * r], exponent + shared.f[n]),
             raised(sums[h][4 * j + 2 * r + 1], exponent + shared.f[n + 1]));
      }
  }
}

// Tail: tail(row, column, value, the next one's) for all of a tile, also what lies outside; then
// tail.finish(exponents of the tile's columns, its row, its column), by all that multiplied.
template <class Tail>
__global__ void __launch_bounds__(kThreads, 1)
    split_gemm_kernel(const __grid_constant__ Operands p, const __grid_constant__ Tail tail) {
  extern __shared__ uint8_t raw[];
  Shared& shared =
      *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) / 1024 * 1024);
  const Place at = place_of(p);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  if (threadIdx.x < hopper::kWarpgroup) {
    hopper::give_registers<40>();
    if (threadIdx.x == 0) copy_panels(shared, p, at);
  } else {
    hopper::take_registers<232>();
    take_exponents(shared, p, at);
    float sums[kTurns][64];
    multiply_panels(sums, shared, at);
    hopper::meet<3>();
    hand_over(sums, shared, at, tail);
    tail.finish(shared.f, at.row, at.column);
  }
}

// --- on the host -----------------------------------------------------------------------------------

// hi and lo in half by panels, (2 pairs, rows rounded up to 8, 32), swizzled: of row r the 16 bytes c
// stand at c ^ (r / 2 % 4). 2^exponents[row] times their sum.
struct Halves {
  const half *hi, *lo;
  const int* exponents;
  int64_t rows;
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

// A matrix by boxes of `box` rows of a panel, eight of them, 512 bytes, a row of the copy engine's,
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

template <class Tail>
cudaError_t launch(const Halves& x, const Halves& w, int64_t K, int parts, const Tail& tail,
                   cudaStream_t stream) {
  if (encoder() == nullptr) return cudaErrorNotSupported;
  Operands p;
  p.e = x.exponents, p.f = w.exponents;
  p.B = static_cast<int>(x.rows), p.N = static_cast<int>(w.rows);
  p.pairs = static_cast<int>((K + 2 * kPanel - 1) / (2 * kPanel));
  const bool described = describe(p.xh, x.hi, x.rows, p.pairs, kRows) &&
                         describe(p.xl, x.lo, x.rows, p.pairs, kRows) &&
                         describe(p.wh, w.hi, w.rows, p.pairs, kColumns) &&
                         describe(p.wl, w.lo, w.rows, p.pairs, kColumns);
  if (!described) return cudaErrorInvalidValue;
  const auto kernel = split_gemm_kernel<Tail>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  const int64_t down = (x.rows + kRows - 1) / kRows, across = (w.rows + kColumns - 1) / kColumns;
  if (down * across > INT32_MAX || parts > 65535) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(down * across), static_cast<unsigned>(parts));
  kernel<<<grid, kThreads, kShared, stream>>>(p, tail);
  return cudaGetLastError();
}

}  // namespace split_gemm
