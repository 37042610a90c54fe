// What a block multiplies and where it stands in shared memory: panels of 32 of k, in a ring. The left
// side of a product of halves: x split before, or raw, and split by who multiplies it.
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

// x and W: as halves; x as it is, W as halves; both as they are, but for TF32's rounding.
enum Form { kHalves, kRawX, kFloats };

// What is multiplied, and in how many products: 3, or 1, of the his alone. Through: tensor cores
// accumulate over all of k.
template <int Columns_, Form Form_, int Products_, bool Through_ = false>
struct Way {
  static constexpr int Columns = Columns_, Products = Products_;
  static constexpr bool Raw = Form_ == kRawX, Floats = Form_ == kFloats, Through = Through_;
  static_assert(Columns % kWide == 0 && (!Raw || Columns == kWide), "registers for a raw x");
  static_assert(Products == 1 || Products == 3, "xh wh alone, or xh wl + xl wh before it");
  static_assert(!Through || (Products == 1 && !Raw), "one exponent a row, and no promotion");
  static_assert(!Through || Columns == (Floats ? 128 : 256), "what one instruction multiplies");
  static_assert(!Floats || Through, "TF32 has one product");
};

// Places of shared memory that panels go through, one after the other, and who waits for whom.
template <int Places>
struct Ring {
  uint64_t full[Places], empty[Places];

  __device__ __forceinline__ void init() {
    for (int s = 0; s < Places; ++s) {
      hopper::init(&full[s], 1);
      hopper::init(&empty[s], kMultipliers * hopper::kWarpgroup / 32);  // warps
    }
  }

  // By the one thread that fills them: waits until all are done with what stands there.
  __device__ __forceinline__ uint64_t* take(int i, int bytes) {
    hopper::wait(&empty[i % Places], (i / Places + 1) % 2);
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

template <class Way>
struct Shared {
  static constexpr int kStages = (192 << 10) / sizeof(Stage<Way>);
  Stage<Way> stages[kStages];
  Ring<kStages> ring;
  int e[kRows], f[Way::Columns];  // exponents of the tile's rows and columns
  static_assert(kStages % 2 == 0 && sizeof(Stage<Way>) % 1024 == 0, "in pairs; swizzles repeat");
};

// Split before: it stays in shared memory.
template <class Way>
struct SplitRows {
  struct Ahead {};  // nothing is read before the panels are there
  const Stage<Way>* pair;
  int first;  // of this warpgroup's rows

  static __device__ __forceinline__ int row_of_eight(int i) { return i; }
  static __device__ __forceinline__ Ahead ahead(const int8_t*) { return {}; }

  __device__ __forceinline__ SplitRows(Shared<Way>& shared, int stage, int mine, const Ahead&)
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

// Raw: a thread holds, of two rows that are 8 apart, what the products ask of it, split. An x 2^c
// beyond float becomes infinite: x W^T is then beyond it too, or within a factor of 2.
template <class Way>
struct RawRows {
  struct Ahead {
    char2 c[4][2];  // exponents of this thread's columns: [step of 16 of k][eight of it]
  };
  uint32_t hi[4][4], lo[4][4];  // [step of 16 of k][row + 2 (second 8 of k)], two halves each
  int top[2];                   // exponents of the rows, for these 64 of k

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
      // 2^-top has to be a number; for zeros and infinities it is no matter which
      top[r] = max((__float_as_int(most[r]) >> 23) - 127 - kTop, -126);
      by[r] = power_of_two(-top[r]);
    }
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int a = 0; a < 4; ++a) split_two(hi[s][a], lo[s][a], v[s][a], by[a % 2]);
  }

  static __device__ __forceinline__ void split_two(uint32_t& hi, uint32_t& lo, const float (&v)[2],
                                               float by) {
    const half2 high = __floats2half2_rn(v[0] * by, v[1] * by);
    hi = reinterpret_cast<const uint32_t&>(high);
    if constexpr (Way::Products == 3) {
      const float2 back = __half22float2(high);
      const half2 low = __floats2half2_rn(fmaf(v[0], by, -back.x), fmaf(v[1], by, -back.y));
      lo = reinterpret_cast<const uint32_t&>(low);
    }
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

template <class Way>
using Rows = std::conditional_t<Way::Raw, RawRows<Way>, SplitRows<Way>>;

}  // namespace split_gemm
