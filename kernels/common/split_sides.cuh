// What a block multiplies and where it stands in shared memory: panels of 32 of k, in a ring. The left
// side of a product of halves: x split before; or raw, and split by who multiplies it, or by the
// warpgroup that asks for the panels (split_staged.cuh).
#pragma once
#include "exponent.cuh"
#include "hopper.cuh"

namespace split_gemm {

constexpr int kRows = 128, kPanel = 32, kStep = 16;  // of a tile; of k in a panel, an instruction
constexpr int kWide = 128;                           // columns that are promoted at once
constexpr int kMultipliers = 2, kThreads = (1 + kMultipliers) * hopper::kWarpgroup;
constexpr int kTop = 14;      // exponent of the largest of 64 after a raw row is split
constexpr int kApart = 60;    // of exponents, from which on a sum is written with the larger one
constexpr int kNoBase = -1024;  // of a sum to which nothing was added yet

// x and W: as halves; x as it is, W as halves, and who multiplies splits x, or the first warpgroup;
// both as they are, but for TF32's rounding.
enum Form { kHalves, kRawX, kStagedX, kFloats };

// What is multiplied, and in how many products: 3, or 1, of the his alone. Through: tensor cores
// accumulate over all of k.
template <int Columns_, Form Form_, int Products_, bool Through_ = false>
struct Way {
  static constexpr int Columns = Columns_, Products = Products_;
  static constexpr bool Raw = Form_ == kRawX, Staged = Form_ == kStagedX, Floats = Form_ == kFloats;
  static constexpr bool Through = Through_;
  static constexpr bool Own = Raw || Staged;  // exponents: for each row and 64 of k its own
  // Registers of a thread that fills stages, and of one that multiplies; of all as many as 168 each.
  static constexpr int kFiller = !Staged ? 40 : Products == 3 ? 56 : 72;
  static constexpr int kMultiplier = (168 * (1 + kMultipliers) - kFiller) / kMultipliers;
  static_assert(Columns % kWide == 0 && (!Raw || Columns == kWide), "registers for a raw x");
  static_assert(Products == 1 || Products == 3, "xh wh alone, or xh wl + xl wh before it");
  static_assert(!Through || (Products == 1 && !Own), "one exponent a row, and no promotion");
  static_assert(!Through || Columns == (Floats ? 128 : 256), "what one instruction multiplies");
  static_assert(!Floats || Through, "TF32 has one product");
};

// Places of shared memory that panels go through, one after the other, and who waits for whom.
template <int Places>
struct Ring {
  uint64_t full[Places], empty[Places];

  // fillers: the thread that asks the copy engine, and warps that write beside it.
  __device__ __forceinline__ void init(int fillers) {
    for (int s = 0; s < Places; ++s) {
      hopper::init(&full[s], fillers);
      hopper::init(&empty[s], kMultipliers * hopper::kWarpgroup / 32);  // warps
    }
  }

  // Waits until all are done with what stands there.
  __device__ __forceinline__ void wait_empty(int i) {
    hopper::wait(&empty[i % Places], (i / Places + 1) % 2);
  }

  // By the one thread that asks for bytes, when the place is empty.
  __device__ __forceinline__ uint64_t* take(int i, int bytes) {
    wait_empty(i);
    hopper::expect(&full[i % Places], bytes);
    return &full[i % Places];
  }

  __device__ __forceinline__ void wait(int i) {
    hopper::wait(&full[i % Places], i / Places % 2);
  }

  // By all of a warp that is done with it.
  __device__ __forceinline__ void free(int i) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) hopper::arrive(&empty[i % Places]);
  }

  __device__ __forceinline__ void wait_pair(int pair) { wait(2 * pair), wait(2 * pair + 1); }
  __device__ __forceinline__ void free_pair(int pair) { free(2 * pair), free(2 * pair + 1); }
};

// A panel of each matrix: xh, then xl, or raw x; wh, then wl.
template <class Way, bool = Way::Floats>
struct Stage {
  half x[Way::Raw || Way::Products == 3 ? 2 : 1][kRows][kPanel];
  half w[Way::Products == 3 ? 2 : 1][Way::Columns][kPanel];
};

template <class Way>
struct Stage<Way, true> {
  float x[kRows][kPanel], w[Way::Columns][kPanel];
};

// Of x as it is, where the first warpgroup splits it: panels, and for each pair of stages the exponents.
template <class Way, bool = Way::Staged>
struct Staging {
  static constexpr int kPlaces = 0;
};

template <class Way>
struct Staging<Way, true> {
  static constexpr int kPlaces = Way::Products == 3 ? 2 : 4;
  float x[kPlaces][kRows][kPanel];
};

template <class Way, int Stages, bool = Way::Staged>
struct Staged {};

template <class Way, int Stages>
struct Staged<Way, Stages, true> {
  float raise[2][2 * kPanel];       // powers of two of the columns, for two pairs in turn
  uint64_t full[Staging<Way>::kPlaces];
  int16_t top[Stages / 2][kRows];  // exponents of the rows
};

template <class Way>
struct Shared {
  static constexpr int kRoom = Way::Staged ? (224 << 10) - sizeof(Staging<Way>) : 192 << 10;
  static constexpr int kStages = kRoom / sizeof(Stage<Way>) / 2 * 2;
  Stage<Way> stages[kStages];
  Staging<Way> staging;
  Staged<Way, kStages> staged;
  Ring<kStages> ring;
  int e[kRows], f[Way::Columns];  // exponents of the tile's rows and columns
  static_assert(sizeof(Stage<Way>) % 1024 == 0, "swizzles repeat");
};

// hi and, of three products, lo <- v by; two halves each.
template <class Way>
__device__ __forceinline__ void split_two(uint32_t& hi, uint32_t& lo, const float (&v)[2], float by) {
  const half2 high = __floats2half2_rn(v[0] * by, v[1] * by);
  hi = reinterpret_cast<const uint32_t&>(high);
  if constexpr (Way::Products == 3) {
    const float2 back = __half22float2(high);
    const half2 low = __floats2half2_rn(fmaf(v[0], by, -back.x), fmaf(v[1], by, -back.y));
    lo = reinterpret_cast<const uint32_t&>(low);
  }
}

// The exponent of a row whose largest number is `most`: 2^-exponent has to be a number; for zeros and
// infinities it is no matter which.
__device__ __forceinline__ int exponent_of_largest(float most) {
  return max((__float_as_int(most) >> 23) - 127 - kTop, -126);
}

// Two rows of a thread, 8 apart, with an exponent each for these 64 of k: sum 2^base += part 2^top.
struct OwnExponents {
  int top[2];

  // base follows where it is left far behind.
  template <int Turns>
  __device__ __forceinline__ void rebase(float (&sums)[Turns][64], int (&base)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (top[r] <= base[r] + kApart) continue;
      const float down = raised(1.f, base[r] - top[r]);
      base[r] = top[r];
#pragma unroll
      for (int h = 0; h < Turns; ++h)
#pragma unroll
        for (int j = 0; j < 32; ++j) sums[h][j / 2 * 4 + j % 2 + 2 * r] *= down;
    }
  }

  __device__ __forceinline__ void promote(float (&sum)[64], const float (&part)[64],
                                          const int (&base)[2]) const {
    const float scale[2] = {raised(1.f, top[0] - base[0]), raised(1.f, top[1] - base[1])};
#pragma unroll
    for (int j = 0; j < 64; ++j) sum[j] = fmaf(part[j], scale[j / 2 % 2], sum[j]);
  }
};

// One exponent a row, for all of k.
struct SameExponents {
  template <int Turns>
  __device__ __forceinline__ void rebase(float (&)[Turns][64], int (&)[2]) const {}

  __device__ __forceinline__ void promote(float (&sum)[64], const float (&part)[64],
                                          const int (&)[2]) const {
#pragma unroll
    for (int j = 0; j < 64; ++j) sum[j] += part[j];
  }
};

// Split when it is multiplied: it stays in shared memory.
template <class Way>
struct SplitRows : std::conditional_t<Way::Staged, OwnExponents, SameExponents> {
  struct Ahead {};  // nothing is read before the panels are there
  const Stage<Way>* pair;
  int first;  // of this warpgroup's rows

  static __device__ __forceinline__ int row_of_eight(int i) { return i; }
  static __device__ __forceinline__ Ahead ahead(const int8_t*) { return {}; }

  __device__ __forceinline__ SplitRows(Shared<Way>& shared, int stage, int mine, const Ahead&)
      : pair(shared.stages + stage), first((mine - 1) * 64) {
    if constexpr (Way::Staged) {
      const int row = first + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
      for (int r = 0; r < 2; ++r) this->top[r] = shared.staged.top[stage / 2][row + 8 * r];
    }
  }

  template <int Part>  // 0: hi, 1: lo
  __device__ __forceinline__ void multiply(float (&part)[64], int panel,
                                           const half (*w)[kPanel], bool add) const {
    const uint64_t a = hopper::rows_of_32(pair[panel].x[Part] + first), b = hopper::rows_of_32(w);
#pragma unroll
    for (int k = 0; k < kPanel / kStep; ++k)
      hopper::multiply(part, a + k * hopper::kNext, b + k * hopper::kNext, add || k > 0);
  }
};

// Raw: a thread holds, of two rows that are 8 apart, what the products ask of it, split. An x 2^c
// beyond float becomes infinite: x W^T is then beyond it too, or within a factor of 2.
template <class Way>
struct RawRows : OwnExponents {
  struct Ahead {
    char2 c[4][2];  // exponents of this thread's columns: [step of 16 of k][eight of it]
  };
  uint32_t hi[4][4], lo[4][4];  // [step of 16 of k][row + 2 (second 8 of k)], two halves each

  // Which of eight rows of x the i-th of a product is: even ones first, so that the four that half a
  // warp reads at once stand in different banks.
  static __device__ __forceinline__ int row_of_eight(int i) { return i % 4 * 2 + i / 4; }

  // Of the columns from c on: asked for a pair of panels ahead, as it may come from L2.
  static __device__ __forceinline__ Ahead ahead(const int8_t* c) {
    Ahead found;
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int q = 0; q < 2; ++q)
        found.c[s][q] = __ldg(
            reinterpret_cast<const char2*>(c + s * kStep + 8 * q + threadIdx.x % 4 * 2));
    return found;
  }

  __device__ __forceinline__ RawRows(const Shared<Way>& shared, int stage, int mine,
                                     const Ahead& of_k) {
    float v[4][4][2], most[2] = {0.f, 0.f};
    const int lane = threadIdx.x % 32;
    const int row = threadIdx.x / 32 % 4 * 16 + row_of_eight(lane / 4) + (mine - 1) * 64;
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const float raise[2] = {power_of_two(of_k.c[s][q].x), power_of_two(of_k.c[s][q].y)};
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
      top[r] = exponent_of_largest(most[r]);
      by[r] = power_of_two(-top[r]);
    }
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int a = 0; a < 4; ++a) split_two<Way>(hi[s][a], lo[s][a], v[s][a], by[a % 2]);
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
};

template <class Way>
using Rows = std::conditional_t<Way::Raw, RawRows<Way>, SplitRows<Way>>;

}  // namespace split_gemm
