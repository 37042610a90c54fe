// z = x W^T in float32's accuracy on the tensor cores of a Hopper GPU, for any tail.
//   x[i,k] 2^c[k] = 2^e (xh[i,k] + xl[i,k]),  W[n,k] 2^-c[k] = 2^f[n] (wh[n,k] + wl[n,k]),
//   h and l in half;  z[i,n] = 2^f[n] sum_k 2^e (xh wl + xl wh + xh wh)[k]
// A tensor core rounds what it accumulates toward zero, in every instruction. So it accumulates over
// 64 of k only, small terms first, and the sum of these goes on in ordinary float32 registers, that
// round to nearest ("promotion").
// Who owns what: a block owns a tile of 128 x Columns outputs, over one part of k. One thread asks the
//   copy engine for panels of 32 of k, some stages ahead. Two warpgroups own 64 rows each and
//   multiply, 128 columns at a time. They take turns: while one promotes, waits and begins again, the
//   other's products run.
// Two ways to take x. Split: xh, xl were made before, with an exponent a row. Raw: x as it is; each
//   thread splits what it multiplies, with an exponent for each row and 64 of k, which costs
//   registers (128 columns, not 256) and no pass over x.
// Moves: a block reads 512 + 4 Columns bytes of L2 for each of k. Blocks with the same columns run side
//   by side, so that W comes from memory once.
#pragma once
#include "exponent.cuh"
#include "hopper.cuh"

namespace split_gemm {

constexpr int kRows = 128, kPanel = 32, kStep = 16;  // of a tile; of k in a panel, an instruction
constexpr int kWide = 128;                           // columns of one instruction
constexpr int kMultipliers = 2, kThreads = (1 + kMultipliers) * hopper::kWarpgroup;
constexpr int kTop = 14;      // exponent of the largest of 64 after a raw row is split
constexpr int kApart = 60;    // of exponents, from which on a sum is written with the larger one
constexpr int kNoBase = -1024;  // of a sum to which nothing was added yet

template <int Columns>
struct Stage {  // a panel of each matrix: xh, then xl; or raw x
  half x[2][kRows][kPanel], wh[Columns][kPanel], wl[Columns][kPanel];
};

template <int Columns>
struct Shared {
  static constexpr int kStages = Columns == 256 ? 4 : 6;
  Stage<Columns> stages[kStages];
  uint64_t full[kStages], empty[kStages];
  alignas(16) int8_t c[kStages][kPanel];
  int e[kRows], f[Columns];  // exponents of the tile's rows and columns
};
static_assert(sizeof(Stage<256>) % 1024 == 0 && sizeof(Stage<128>) % 1024 == 0, "swizzles repeat");

// The matrices as the copy engine sees them, and how far k goes.
struct Operands {
  CUtensorMap x, xl, wh, wl;  // x: xh, or raw
  const int *e, *f;
  const int8_t* c;
  int B, N, pairs;  // of panels: what a tensor core accumulates; the last filled up with zeros
};

// Of a block: the first row and column of its tile, its first pair of panels and how many.
struct Place {
  int row, column, first, pairs;
};

template <int Columns>
__device__ __forceinline__ Place place_of(const Operands& p) {
  const int down = (p.B + kRows - 1) / kRows;  // tiles that share columns
  const int64_t parts = gridDim.y, part = blockIdx.y;
  const int first = static_cast<int>(p.pairs * part / parts);
  const int last = static_cast<int>(p.pairs * (part + 1) / parts);
  const int row = blockIdx.x % down, column = blockIdx.x / down;
  return {row * kRows, column * Columns, first, last - first};
}

// One thread of the block: fills stage after stage, as soon as all that read it are done with it.
template <int Columns, bool Raw>
__device__ __forceinline__ void copy_panels(Shared<Columns>& shared, const Operands& p,
                                            const Place& at) {
  constexpr int kStages = Shared<Columns>::kStages;
  constexpr int kLong = 8;  // rows of a matrix in a row of the copy engine's
  const int row = at.row / kLong, column = at.column / kLong;
  for (int i = 0; i < 2 * at.pairs; ++i) {
    const int s = i % kStages, panel = 2 * at.first + i;
    Stage<Columns>& stage = shared.stages[s];
    uint64_t* full = &shared.full[s];
    hopper::wait(&shared.empty[s], (i / kStages + 1) % 2);
    hopper::expect(full, sizeof(stage) + (Raw ? kPanel : 0));
    if constexpr (Raw) {
      hopper::load_box(stage.x, p.x, panel * kPanel, at.row, full);
      hopper::load_bytes(shared.c[s], p.c + panel * kPanel, kPanel, full);
    } else {
      hopper::load_box(stage.x[0], p.x, 0, row, panel, full);
      hopper::load_box(stage.x[1], p.xl, 0, row, panel, full);
    }
    hopper::load_box(stage.wl, p.wl, 0, column, panel, full);
    hopper::load_box(stage.wh, p.wh, 0, column, panel, full);
  }
}

// --- the left side of a pair of panels, for 64 rows -------------------------------------------------

// Split before: it stays in shared memory.
template <int Columns>
struct SplitRows {
  const Stage<Columns>* pair;
  int first;  // of this warpgroup's rows

  __device__ __forceinline__ SplitRows(Shared<Columns>& shared, int stage, int mine)
      : pair(shared.stages + stage), first((mine - 1) * 64) {}

  template <int Part>  // 0: hi, 1: lo
  __device__ __forceinline__ void multiply(float (&part)[64], int panel,
                                           const half (*w)[kPanel], bool add) const {
    const uint64_t a = hopper::rows_of_32(pair[panel].x[Part] + first), b = hopper::rows_of_32(w);
#pragma unroll
    for (int k = 0; k < kPanel / kStep; ++k)
      hopper::multiply(part, a + k * hopper::kNext, b + k * hopper::kNext, add || k > 0);
  }

  __device__ __forceinline__ void promote(float (&sum)[64], const float (&part)[64],
                                          int (&)[2]) const {
#pragma unroll
    for (int j = 0; j < 64; ++j) sum[j] += part[j];
  }
};

// Raw: a thread holds, of rows g and g + 8 of its warp's 16, what the products ask of it, split. An
// x 2^c beyond float belongs to an output that is beyond it too.
template <int Columns>
struct RawRows {
  uint32_t hi[4][4], lo[4][4];  // [step of 16 of k][row + 2 (second 8 of k)], two halves each
  int top[2];                   // exponents of the rows, for these 64 of k

  __device__ __forceinline__ RawRows(Shared<Columns>& shared, int stage, int mine) {
    float v[4][4][2], most[2] = {0.f, 0.f};
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4 + (mine - 1) * 64;
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const int8_t* of_k = shared.c[stage + s / 2] + s % 2 * kStep + 8 * q + lane % 4 * 2;
        const char2 c = *reinterpret_cast<const char2*>(of_k);
        const float raise[2] = {power_of_two(c.x), power_of_two(c.y)};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          // rows of 128 bytes, swizzled: of row i the 16 bytes b stand at b ^ (i % 8)
          const int i = row + 8 * r, b = s % 2 * 4 + q * 2 + lane % 4 / 2;
          const auto* x = reinterpret_cast<const uint8_t*>(shared.stages[stage + s / 2].x);
          const auto* from = x + i * 128 + (b ^ i % 8) * 16 + lane % 2 * 8;
          const float2 two = *reinterpret_cast<const float2*>(from);
          float(&to)[2] = v[s][r + 2 * q];
          to[0] = two.x * raise[0], to[1] = two.y * raise[1];
          most[r] = fmaxf(most[r], fmaxf(fabsf(to[0]), fabsf(to[1])));
        }
      }
    float by[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 1));
      most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 2));
      // 2^-top has to be a number; for zeros and infinities it is no matter which
      top[r] = max((__float_as_int(most[r]) >> 23) - 127 - kTop, -126);
      by[r] = power_of_two(-top[r]);
    }
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int a = 0; a < 4; ++a) split(hi[s][a], lo[s][a], v[s][a], by[a % 2]);
  }

  static __device__ __forceinline__ void split(uint32_t& hi, uint32_t& lo, const float (&v)[2],
                                               float by) {
    const half2 high = __floats2half2_rn(v[0] * by, v[1] * by);
    const float2 back = __half22float2(high);
    const half2 low = __floats2half2_rn(fmaf(v[0], by, -back.x), fmaf(v[1], by, -back.y));
    hi = reinterpret_cast<const uint32_t&>(high), lo = reinterpret_cast<const uint32_t&>(low);
  }

  template <int Part>
  __device__ __forceinline__ void multiply(float (&part)[64], int panel,
                                           const half (*w)[kPanel], bool add) const {
    const uint64_t b = hopper::rows_of_32(w);
#pragma unroll
    for (int k = 0; k < kPanel / kStep; ++k)
      hopper::multiply(part, Part ? lo[2 * panel + k] : hi[2 * panel + k], b + k * hopper::kNext,
                       add || k > 0);
  }

  // sum 2^base += part 2^top; base follows where it is left far behind.
  __device__ __forceinline__ void promote(float (&sum)[64], const float (&part)[64],
                                          int (&base)[2]) const {
    float scale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (top[r] > base[r] + kApart) {
        const float down = raised(1.f, base[r] - top[r]);
        base[r] = top[r];
#pragma unroll
        for (int j = 0; j < 32; ++j) sum[j / 2 * 4 + j % 2 + 2 * r] *= down;
      }
      scale[r] = raised(1.f, top[r] - base[r]);
    }
#pragma unroll
    for (int j = 0; j < 64; ++j) sum[j] = fmaf(part[j], scale[j / 2 % 2], sum[j]);
  }
};

// --- the products -----------------------------------------------------------------------------------

// part (64, 128) <- the three products of a pair of panels, for columns from n on. At the end the
// other warpgroup's turn is over the last of them: they keep the tensor cores busy meanwhile.
template <int Columns, class Rows>
__device__ __forceinline__ void multiply_pair(float (&part)[64], const Rows& x,
                                              const Stage<Columns>* pair, int n, int mine) {
  hopper::take_turn(mine);
  hopper::fence_products();
  x.template multiply<0>(part, 0, pair[0].wl + n, false);
  x.template multiply<0>(part, 1, pair[1].wl + n, true);
  x.template multiply<1>(part, 0, pair[0].wh + n, true);
  x.template multiply<1>(part, 1, pair[1].wh + n, true);
  hopper::commit_products();
  x.template multiply<0>(part, 0, pair[0].wh + n, true);
  x.template multiply<0>(part, 1, pair[1].wh + n, true);
  hopper::commit_products();
  hopper::wait_products<1>();
  hopper::pass_turn(3 - mine);
  hopper::wait_products<0>();
}

// sums (64, Columns) <- this warpgroup's outputs, without the exponents of rows and columns; those of
// raw rows go to shared memory.
template <int Columns, bool Raw>
__device__ __forceinline__ void multiply_panels(float (&sums)[Columns / kWide][64],
                                                Shared<Columns>& shared, const Place& at) {
  using Rows = std::conditional_t<Raw, RawRows<Columns>, SplitRows<Columns>>;
  constexpr int kStages = Shared<Columns>::kStages, kTurns = Columns / kWide;
  const int mine = threadIdx.x / hopper::kWarpgroup, lane = threadIdx.x % 32;
  if (mine == 2) hopper::pass_turn(1);
#pragma unroll
  for (int h = 0; h < kTurns; ++h)
#pragma unroll
    for (int j = 0; j < 64; ++j) sums[h][j] = 0.f;
  float part[64];
  int base[2] = {kNoBase, kNoBase};
  for (int i = 0; i < at.pairs; ++i) {
    const int s = 2 * i % kStages, parity = 2 * i / kStages % 2;
    hopper::wait(&shared.full[s], parity);
    hopper::wait(&shared.full[s + 1], parity);
    const Rows x(shared, s, mine);
#pragma unroll
    for (int h = 0; h < kTurns; ++h) {
      multiply_pair(part, x, shared.stages + s, h * kWide, mine);
      if (h + 1 == kTurns && lane == 0) {  // this warp has read them
        hopper::arrive(&shared.empty[s]);
        hopper::arrive(&shared.empty[s + 1]);
      }
      x.promote(sums[h], part, base);
    }
  }
  const int row = (threadIdx.x / 32 - 4) * 16 + lane / 4;
  if (Raw && lane % 4 == 0) shared.e[row] = base[0], shared.e[row + 8] = base[1];
}

template <int Columns>
__device__ __forceinline__ void init_barriers(Shared<Columns>& shared) {
  for (int s = 0; s < Shared<Columns>::kStages; ++s) {
    hopper::init(&shared.full[s], 1);
    hopper::init(&shared.empty[s], kMultipliers * hopper::kWarpgroup / 32);  // warps
  }
  hopper::fence_init();
}

// By the multiplying threads: read early, for at the end each would wait for memory.
template <int Columns, bool Raw>
__device__ __forceinline__ void take_exponents(Shared<Columns>& shared, const Operands& p,
                                               const Place& at) {
  const int t = threadIdx.x - hopper::kWarpgroup;
  if (t < Columns) shared.f[t] = at.column + t < p.N ? p.f[at.column + t] : 0;
  if (t < kRows && !Raw) shared.e[t] = at.row + t < p.B ? p.e[at.row + t] : 0;
}

// Hands the outputs of this thread over, two neighbours of a row at a time.
template <int Columns, class Tail>
__device__ __forceinline__ void hand_over(const float (&sums)[Columns / kWide][64],
                                          const Shared<Columns>& shared, const Place& at,
                                          const Tail& tail) {
  const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = 16 * warp + lane / 4 + 8 * r, exponent = shared.e[i];
#pragma unroll
    for (int h = 0; h < Columns / kWide; ++h)
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int n = h * kWide + 8 * j + lane % 4 * 2;
        tail(at.row + i, at.column + n, raised(sums[h][4 * j + 2 * r], exponent + shared.f[n]),
             raised(sums[h][4 * j + 2 * r + 1], exponent + shared.f[n + 1]));
      }
  }
}

// Tail: tail(row, column, value, the next one's) for all of a tile, also what lies outside; then
// tail.finish<Columns>(exponents of the tile's columns, its row, its column), by all that multiplied.
template <int Columns, bool Raw, class Tail>
__global__ void __launch_bounds__(kThreads, 1)
    split_gemm_kernel(const __grid_constant__ Operands p, const __grid_constant__ Tail tail) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared<Columns>& shared = reinterpret_cast<Shared<Columns>&>(memory);
  const Place at = place_of<Columns>(p);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  if (threadIdx.x < hopper::kWarpgroup) {
    hopper::give_registers<40>();
    if (threadIdx.x == 0) copy_panels<Columns, Raw>(shared, p, at);
  } else {
    hopper::take_registers<232>();
    take_exponents<Columns, Raw>(shared, p, at);
    float sums[Columns / kWide][64];
    multiply_panels<Columns, Raw>(sums, shared, at);
    hopper::meet<3>();
    hand_over(sums, shared, at, tail);
    tail.template finish<Columns>(shared.f, at.row, at.column);
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

// Rows `stride` apart, both of 16 bytes; c, an exponent a column, is padded to 64.
struct Raw {
  const float* x;
  const int8_t* c;
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

// Raw rows by boxes of a panel of kRows of them, swizzled by the copy engine.
inline bool describe(CUtensorMap& map, const Raw& x, int64_t K) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(K), static_cast<cuuint64_t>(x.rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(x.stride) * sizeof(float)};
  const cuuint32_t boxes[] = {kPanel, kRows}, steps[] = {1, 1};
  return encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, const_cast<float*>(x.x), sizes,
                   strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <int Columns, bool IsRaw, class Tail>
cudaError_t launch(Operands& p, const Halves& w, int64_t rows, int parts, const Tail& tail,
                   cudaStream_t stream) {
  p.B = static_cast<int>(rows), p.N = static_cast<int>(w.rows), p.f = w.exponents;
  if (!describe(p.wh, w.hi, w.rows, p.pairs, Columns) ||
      !describe(p.wl, w.lo, w.rows, p.pairs, Columns))
    return cudaErrorInvalidValue;
  const auto kernel = split_gemm_kernel<Columns, IsRaw, Tail>;
  constexpr int kShared = sizeof(Shared<Columns>);
  static_assert(kShared <= 227 << 10, "what a block may have");
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  const int64_t down = (rows + kRows - 1) / kRows, across = (w.rows + Columns - 1) / Columns;
  if (down * across > INT32_MAX || parts > 65535) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(down * across), static_cast<unsigned>(parts));
  kernel<<<grid, kThreads, kShared, stream>>>(p, tail);
  return cudaGetLastError();
}

inline int pairs_of(int64_t K) { return static_cast<int>((K + 2 * kPanel - 1) / (2 * kPanel)); }

template <class Tail>
cudaError_t launch(const Halves& x, const Halves& w, int64_t K, int parts, const Tail& tail,
                   cudaStream_t stream) {
  if (encoder() == nullptr) return cudaErrorNotSupported;
  Operands p = {};
  p.pairs = pairs_of(K), p.e = x.exponents;
  if (!describe(p.x, x.hi, x.rows, p.pairs, kRows) ||
      !describe(p.xl, x.lo, x.rows, p.pairs, kRows))
    return cudaErrorInvalidValue;
  return launch<256, false>(p, w, x.rows, parts, tail, stream);
}

template <class Tail>
cudaError_t launch(const Raw& x, const Halves& w, int64_t K, int parts, const Tail& tail,
                   cudaStream_t stream) {
  if (encoder() == nullptr) return cudaErrorNotSupported;
  Operands p = {};
  p.pairs = pairs_of(K), p.c = x.c;
  if (!describe(p.x, x, K)) return cudaErrorInvalidValue;
  return launch<128, true>(p, w, x.rows, parts, tail, stream);
}

}  // namespace split_gemm
