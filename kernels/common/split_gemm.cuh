// z = x W^T on the tensor cores of a Hopper GPU, for any tail: in float32's accuracy, or in TF32's.
//   x[i,k] 2^c[k] = 2^e (xh[i,k] + xl[i,k]),  W[n,k] 2^-c[k] = 2^f[n] (wh[n,k] + wl[n,k]),
//   h and l in half;  z[i,n] = 2^f[n] sum_k 2^e (xh wl + xl wh + xh wh)[k]
// Three products have float32's accuracy. A tensor core rounds what it accumulates toward zero, in
// every instruction. So it accumulates over 64 of k only, small terms first, and the sum of these goes
// on in ordinary float32 registers, that round to nearest ("promotion"). Longer intervals are there to
// be measured, with tiles of 128 columns.
// One product, xh wh, rounds each factor to 11 bits, as TF32 does. Where its drift, 1e-5, is small
// beside what else is lost, tensor cores accumulate over all of k.
// Who owns what: a block owns a tile of 128 x Columns outputs, over one part of k. One thread asks the
//   copy engine for panels of 32 of k, some stages ahead. Two warpgroups own 64 rows each and
//   multiply. Where they promote they do so 128 columns at a time, and take turns: while one promotes,
//   waits and begins again, the other's products run.
// Three ways. Split: xh, xl were made before, with an exponent a row. Raw: x as it is; each thread splits
//   what it multiplies, with an exponent for each row and 64 of k, which costs registers (128 columns,
//   not 256) and no walk over x. Floats, for TF32's accuracy: x and W as they are, rounded to 11 bits
//   by the copy engine; no exponents, nothing is split, at half of the rate and twice W's bytes.
// Moves: of L2, for each of k, a block reads 512 + 4 Columns bytes for three products, 256 + 2 Columns
//   for one (512 + 2 Columns with a raw x), 512 + 4 Columns of floats. Blocks with the same columns run
//   side by side, so that W comes from memory once.
#pragma once
#include "dependent_launch.cuh"
#include "split_sides.cuh"

namespace split_gemm {

constexpr int kStepOfFloats = 8;  // of k in an instruction
constexpr int kLong = 8;          // rows of halves in a row of the copy engine's

// The matrices as the copy engine sees them, and how far k goes.
struct Operands {
  CUtensorMap x, xl, wh, wl;  // x: xh, or as it is; wh: or W as it is
  const int *e, *f;
  const int8_t* c;
  int B, N, pairs;  // of panels, the last filled up with zeros
  int promote;      // pairs that a tensor core accumulates: 1, or more to see what becomes of it
};

// Of a block: the first row and column of its tile, its first pair of panels and how many, at least one.
struct Place {
  int row, column, first, pairs;
};

template <class Way>
using Sums = float[Way::Columns / kWide][64];

template <class Way>
__device__ __forceinline__ Place place_of(const Operands& p) {
  const int down = (p.B + kRows - 1) / kRows;  // tiles that share columns
  const int64_t parts = gridDim.y, part = blockIdx.y;
  const int first = static_cast<int>(p.pairs * part / parts);
  const int last = static_cast<int>(p.pairs * (part + 1) / parts);
  const int row = blockIdx.x % down, column = blockIdx.x / down;
  return {row * kRows, column * Way::Columns, first, last - first};
}

// One thread of the block: fills stage after stage, as soon as all that read it are done with it.
template <class Way>
__device__ __forceinline__ void copy_panels(Shared<Way>& shared, const Operands& p,
                                            const Place& at) {
  constexpr bool kBoth = Way::Products == 3;
  const int row = at.row / kLong, column = at.column / kLong;
  for (int i = 0; i < 2 * at.pairs; ++i) {
    const int panel = 2 * at.first + i;
    Stage<Way>& stage = shared.stages[i % Shared<Way>::kStages];
    uint64_t* full = shared.ring.take(i, sizeof(stage));
    if constexpr (Way::Raw || Way::Floats) {
      hopper::load_box(stage.x, p.x, panel * kPanel, at.row, full);
    } else {
      hopper::load_box(stage.x[0], p.x, 0, row, panel, full);
      if constexpr (kBoth) hopper::load_box(stage.x[1], p.xl, 0, row, panel, full);
    }
    if constexpr (Way::Floats) {
      hopper::load_box(stage.w, p.wh, panel * kPanel, at.column, full);
    } else {
      if constexpr (kBoth) hopper::load_box(stage.w[1], p.wl, 0, column, panel, full);
      hopper::load_box(stage.w[0], p.wh, 0, column, panel, full);
    }
  }
}

// --- the products -----------------------------------------------------------------------------------

// part (64, 128) <- or += the products of a pair of panels, for columns from n on, when it is this
// warpgroup's turn. At the end the other's turn is over the last of them: they keep the tensor cores
// busy meanwhile.
template <class Way>
__device__ __forceinline__ void multiply_pair(float (&part)[64], const Rows<Way>& x,
                                              const Stage<Way>* pair, int n, int mine, bool add) {
  hopper::take_turn(mine);
  hopper::fence_products();
  if constexpr (Way::Products == 3) {
    x.template multiply<0>(part, 0, pair[0].w[1] + n, add);
    x.template multiply<0>(part, 1, pair[1].w[1] + n, true);
    x.template multiply<1>(part, 0, pair[0].w[0] + n, true);
    x.template multiply<1>(part, 1, pair[1].w[0] + n, true);
    hopper::commit_products();
    add = true;
  }
  x.template multiply<0>(part, 0, pair[0].w[0] + n, add);
  if constexpr (Way::Products == 1) hopper::commit_products();
  x.template multiply<0>(part, 1, pair[1].w[0] + n, true);
  hopper::commit_products();
  hopper::wait_products<1>();
  hopper::pass_turn(3 - mine);
  hopper::wait_products<0>();
}

// sums (64, Columns) <- this warpgroup's outputs, without the exponents of rows and columns, promoted;
// those of raw rows go to shared memory.
template <class Way>
__device__ __forceinline__ void multiply_by_turns(Sums<Way>& sums, Shared<Way>& shared,
                                                  const Operands& p, const Place& at) {
  constexpr int kStages = Shared<Way>::kStages, kTurns = Way::Columns / kWide;
  constexpr bool kIsLong = kTurns == 1 && !Way::Raw;  // what is not promoted stays in the one `part`
  const int mine = threadIdx.x / hopper::kWarpgroup, lane = threadIdx.x % 32;
  if (mine == 2) hopper::pass_turn(1);
#pragma unroll
  for (int h = 0; h < kTurns; ++h)
#pragma unroll
    for (int j = 0; j < 64; ++j) sums[h][j] = 0.f;
  float part[64];
  int base[2] = {kNoBase, kNoBase};
  const auto ahead = [&](int i) {
    return Rows<Way>::ahead(p.c + min(at.first + i, p.pairs - 1) * 2 * kPanel);
  };
  auto of_k = ahead(0);
  for (int i = 0; i < at.pairs; ++i) {
    const int s = 2 * i % kStages;
    shared.ring.wait_pair(i);
    const Rows<Way> x(shared, s, mine, of_k);
    of_k = ahead(i + 1);
#pragma unroll
    for (int h = 0; h < kTurns; ++h) {
      const bool add = kIsLong && i % p.promote > 0;
      multiply_pair<Way>(part, x, shared.stages + s, h * kWide, mine, add);
      if (h + 1 == kTurns) shared.ring.free_pair(i);
      if (!kIsLong || (i + 1) % p.promote == 0 || i + 1 == at.pairs) x.promote(sums[h], part, base);
    }
  }
  const int row = (threadIdx.x / 32 - 4) * 16 + Rows<Way>::row_of_eight(lane / 4);
  if (Way::Raw && lane % 4 == 0) shared.e[row] = base[0], shared.e[row + 8] = base[1];
}

// sums <- or += the products of a panel, for this warpgroup's rows from `first` on.
template <class Way>
__device__ __forceinline__ void ask_panel(Sums<Way>& sums, const Stage<Way>& panel, int first,
                                          bool add) {
  using hopper::kNext;
  if constexpr (Way::Floats) {
    const uint64_t a = hopper::rows_of_32_floats(panel.x + first);
    const uint64_t b = hopper::rows_of_32_floats(panel.w);
#pragma unroll
    for (int k = 0; k < kPanel / kStepOfFloats; ++k)
      hopper::multiply_tf32(sums[0], a + k * kNext, b + k * kNext, add || k > 0);
  } else {
    const uint64_t a = hopper::rows_of_32(panel.x[0] + first);
    const uint64_t b = hopper::rows_of_32(panel.w[0]);
#pragma unroll
    for (int k = 0; k < kPanel / kStep; ++k)
      hopper::multiply(sums, a + k * kNext, b + k * kNext, add || k > 0);
  }
}

// sums <- the same without promotion: products follow one another, a panel is free when the next has
// begun.
template <class Way>
__device__ __forceinline__ void multiply_through(Sums<Way>& sums, Shared<Way>& shared,
                                                 const Place& at) {
  constexpr int kStages = Shared<Way>::kStages;
  const int first = (threadIdx.x / hopper::kWarpgroup - 1) * 64;
  const auto multiply = [&](int i, bool add) {
    shared.ring.wait(i);
    hopper::fence_products();
    ask_panel<Way>(sums, shared.stages[i % kStages], first, add);
    hopper::commit_products();
  };
  multiply(0, false);
  for (int i = 1; i < 2 * at.pairs; ++i) {
    multiply(i, true);
    hopper::wait_products<1>();
    shared.ring.free(i - 1);
  }
  hopper::wait_products<0>();
}

// By the multiplying threads: read early, for at the end each would wait for memory.
template <class Way>
__device__ __forceinline__ void take_exponents(Shared<Way>& shared, const Operands& p,
                                               const Place& at) {
  const int t = threadIdx.x - hopper::kWarpgroup;
  if (Way::Floats) return;
  if (t < Way::Columns) shared.f[t] = at.column + t < p.N ? p.f[at.column + t] : 0;
  if (t < kRows && !Way::Raw) shared.e[t] = at.row + t < p.B ? p.e[at.row + t] : 0;
}

// True for all that multiplied where exponents of the tile are so small that the sum of two is one, too.
template <class Way>
__device__ __forceinline__ bool exponents_are_near(const Shared<Way>& shared) {
  constexpr int kNear = 60;
  if constexpr (Way::Floats) return true;
  const int t = threadIdx.x - hopper::kWarpgroup;
  const auto far = [](int e) { return e < -kNear || e > kNear; };
  return !hopper::any<3>((t < Way::Columns && far(shared.f[t])) || (t < kRows && far(shared.e[t])));
}

// Hands the outputs of this thread over, two neighbours of a row at a time. Near: as above, of a tile
// that the tail holds whole.
template <class Way, bool Near, class Tail>
__device__ __forceinline__ void hand_over(const Sums<Way>& sums, const Shared<Way>& shared,
                                          const Place& at, const Tail& tail) {
  const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32, n = lane % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = 16 * warp + Rows<Way>::row_of_eight(lane / 4) + 8 * r;
    const int exponent = Way::Floats ? 0 : shared.e[i];
    const auto row = tail.row(at.row + i, at.column + n);
#pragma unroll
    for (int h = 0; h < Way::Columns / kWide; ++h)
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int c = h * kWide + 8 * j;
        float two[2] = {sums[h][4 * j + 2 * r], sums[h][4 * j + 2 * r + 1]};
#pragma unroll
        for (int of = 0; of < 2 && !Way::Floats; ++of) {
          const int s = exponent + shared.f[c + n + of];
          two[of] = Near ? two[of] * power_of_two(s) : raised(two[of], s);
        }
        row.template give<Near>(c, two[0], two[1]);
      }
  }
}

// Tail: tail.row(i, n).give<Whole>(c, value, the next one's) for (i, n + c) and (i, n + c + 1), also
// what lies outside, but where Whole says that all of the tile is inside, as tail.holds<Columns>(its row,
// its column) has said; then tail.finish<Columns>(exponents of its columns, its row, its column). By
// all that multiplied.
template <class Way, class Tail>
__global__ void __launch_bounds__(kThreads, 1)
    split_gemm_kernel(const __grid_constant__ Operands p, const __grid_constant__ Tail tail) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared<Way>& shared = reinterpret_cast<Shared<Way>&>(memory);
  const Place at = place_of<Way>(p);
  if (threadIdx.x == 0) {
    shared.ring.init();
    hopper::fence_init();
  }
  wait_for_previous();
  __syncthreads();
  if (threadIdx.x < hopper::kWarpgroup) {
    hopper::give_registers<40>();
    if (threadIdx.x == 0) copy_panels<Way>(shared, p, at);
  } else {
    hopper::take_registers<232>();
    take_exponents(shared, p, at);
    float sums[Way::Columns / kWide][64];
    if constexpr (Way::Through)
      multiply_through<Way>(sums, shared, at);
    else
      multiply_by_turns<Way>(sums, shared, p, at);
    hopper::meet<3>();
    if (exponents_are_near<Way>(shared) && tail.template holds<Way::Columns>(at.row, at.column))
      hand_over<Way, true>(sums, shared, at, tail);
    else
      hand_over<Way, false>(sums, shared, at, tail);
    tail.template finish<Way::Columns>(shared.f, at.row, at.column);
  }
}

}  // namespace split_gemm
