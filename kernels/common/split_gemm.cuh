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
//   multiply, 128 columns at a time. Where they promote they take turns: while one promotes, waits and
//   begins again, the other's products run.
// Two ways to take x. Split: xh, xl were made before, with an exponent a row. Raw: x as it is; each
//   thread splits what it multiplies, with an exponent for each row and 64 of k, which costs
//   registers (128 columns, not 256) and no walk over x.
// Moves: of L2, for each of k, a block reads 512 + 4 Columns bytes for three products, 256 + 2 Columns
//   for one (512 + 2 Columns with a raw x). Blocks with the same columns run side by side, so that W
//   comes from memory once.
#pragma once
#include "split_sides.cuh"

namespace split_gemm {

// The matrices as the copy engine sees them, and how far k goes.
struct Operands {
  CUtensorMap x, xl, wh, wl;  // x: xh, or raw
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
  constexpr int kStages = Shared<Way>::kStages;
  constexpr int kLong = 8;  // rows of a matrix in a row of the copy engine's
  constexpr bool kBoth = Way::Products == 3;
  const int row = at.row / kLong, column = at.column / kLong;
  for (int i = 0; i < 2 * at.pairs; ++i) {
    const int s = i % kStages, panel = 2 * at.first + i;
    Stage<Way>& stage = shared.stages[s];
    uint64_t* full = &shared.full[s];
    hopper::wait(&shared.empty[s], (i / kStages + 1) % 2);
    hopper::expect(full, sizeof(stage));
    if constexpr (Way::Raw) {
      hopper::load_box(stage.x, p.x, panel * kPanel, at.row, full);
    } else {
      hopper::load_box(stage.x[0], p.x, 0, row, panel, full);
      if constexpr (kBoth) hopper::load_box(stage.x[1], p.xl, 0, row, panel, full);
    }
    if constexpr (kBoth) hopper::load_box(stage.w[1], p.wl, 0, column, panel, full);
    hopper::load_box(stage.w[0], p.wh, 0, column, panel, full);
  }
}

// --- the products -----------------------------------------------------------------------------------

template <class Way>
__device__ __forceinline__ void wait_pair(Shared<Way>& shared, int pair) {
  const int s = 2 * pair % Shared<Way>::kStages, parity = 2 * pair / Shared<Way>::kStages % 2;
  hopper::wait(&shared.full[s], parity);
  hopper::wait(&shared.full[s + 1], parity);
}

// By all of a warp that has read the pair: it may be written again.
template <class Way>
__device__ __forceinline__ void free_pair(Shared<Way>& shared, int pair) {
  const int s = 2 * pair % Shared<Way>::kStages;
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    hopper::arrive(&shared.empty[s]);
    hopper::arrive(&shared.empty[s + 1]);
  }
}

// Asks for part (64, 128) <- or += the products of a pair of panels, for columns from n on; the last
// of them are a group of their own.
template <class Way>
__device__ __forceinline__ void ask_pair(float (&part)[64], const Rows<Way>& x,
                                         const Stage<Way>* pair, int n, bool add) {
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
}

// The same when it is this warpgroup's turn, and done. At the end the other's turn is over the last of
// them: they keep the tensor cores busy meanwhile.
template <class Way>
__device__ __forceinline__ void multiply_pair(float (&part)[64], const Rows<Way>& x,
                                              const Stage<Way>* pair, int n, int mine, bool add) {
  hopper::take_turn(mine);
  ask_pair<Way>(part, x, pair, n, add);
  hopper::wait_products<1>();
  hopper::pass_turn(3 - mine);
  hopper::wait_products<0>();
}

template <class Way>
using Sums = float[Way::Columns / kWide][64];

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
    wait_pair(shared, i);
    const Rows<Way> x(shared, s, mine, of_k);
    of_k = ahead(i + 1);
#pragma unroll
    for (int h = 0; h < kTurns; ++h) {
      const bool add = kIsLong && i % p.promote > 0;
      multiply_pair<Way>(part, x, shared.stages + s, h * kWide, mine, add);
      if (h + 1 == kTurns) free_pair(shared, i);
      if (!kIsLong || (i + 1) % p.promote == 0 || i + 1 == at.pairs) x.promote(sums[h], part, base);
    }
  }
  const int row = (threadIdx.x / 32 - 4) * 16 + Rows<Way>::row_of_eight(lane / 4);
  if (Way::Raw && lane % 4 == 0) shared.e[row] = base[0], shared.e[row + 8] = base[1];
}

// One product of a raw x: while a pair is multiplied, the next one is split, which takes longer.
template <class Way>
__device__ __forceinline__ void multiply_raw(float (&sums)[64], Shared<Way>& shared,
                                             const Operands& p, const Place& at) {
  const int mine = threadIdx.x / hopper::kWarpgroup, lane = threadIdx.x % 32;
  if (mine == 2) hopper::pass_turn(1);
#pragma unroll
  for (int j = 0; j < 64; ++j) sums[j] = 0.f;
  float part[64];
  int base[2] = {kNoBase, kNoBase};
  const auto ahead = [&](int i) {
    return Rows<Way>::ahead(p.c + min(at.first + i, p.pairs - 1) * 2 * kPanel);
  };
  auto of_k = ahead(0);
  Rows<Way> even, odd;
  const auto split = [&](Rows<Way>& x, int i) {
    wait_pair(shared, i);
    x.split(shared, 2 * i % Shared<Way>::kStages, mine, of_k);
    of_k = ahead(i + 1);
  };
  const auto multiply = [&](int i, const Rows<Way>& x, Rows<Way>& next) {
    hopper::take_turn(mine);
    ask_pair<Way>(part, x, shared.stages + 2 * i % Shared<Way>::kStages, 0, false);
    hopper::pass_turn(3 - mine);
    if (i + 1 < at.pairs) split(next, i + 1);
    hopper::wait_products<0>();
    free_pair(shared, i);
    x.promote(sums, part, base);
  };
  split(even, 0);
  for (int i = 0; i < at.pairs; i += 2) {
    multiply(i, even, odd);
    if (i + 1 < at.pairs) multiply(i + 1, odd, even);
  }
  const int row = (threadIdx.x / 32 - 4) * 16 + Rows<Way>::row_of_eight(lane / 4);
  if (lane % 4 == 0) shared.e[row] = base[0], shared.e[row + 8] = base[1];
}

// sums <- the same without promotion: products follow one another, a pair is free when the next has
// begun.
template <class Way>
__device__ __forceinline__ void multiply_through(Sums<Way>& sums, Shared<Way>& shared,
                                                 const Place& at) {
  const int mine = threadIdx.x / hopper::kWarpgroup;
  const auto multiply = [&](int i, bool add) {
    const int s = 2 * i % Shared<Way>::kStages;
    wait_pair(shared, i);
    const Rows<Way> x(shared, s, mine, {});
    hopper::fence_products();
#pragma unroll
    for (int panel = 0; panel < 2; ++panel)
#pragma unroll
      for (int h = 0; h < Way::Columns / kWide; ++h)
        x.template multiply<0>(sums[h], panel, shared.stages[s + panel].w[0] + h * kWide,
                               add || panel > 0);
    hopper::commit_products();
  };
  multiply(0, false);
  for (int i = 1; i < at.pairs; ++i) {
    multiply(i, true);
    hopper::wait_products<1>();
    free_pair(shared, i - 1);
  }
  hopper::wait_products<0>();
}

template <class Way>
__device__ __forceinline__ void init_barriers(Shared<Way>& shared) {
  for (int s = 0; s < Shared<Way>::kStages; ++s) {
    hopper::init(&shared.full[s], 1);
    hopper::init(&shared.empty[s], kMultipliers * hopper::kWarpgroup / 32);  // warps
  }
  hopper::fence_init();
}

// By the multiplying threads: read early, for at the end each would wait for memory.
template <class Way>
__device__ __forceinline__ void take_exponents(Shared<Way>& shared, const Operands& p,
                                               const Place& at) {
  const int t = threadIdx.x - hopper::kWarpgroup;
  if (t < Way::Columns) shared.f[t] = at.column + t < p.N ? p.f[at.column + t] : 0;
  if (t < kRows && !Way::Raw) shared.e[t] = at.row + t < p.B ? p.e[at.row + t] : 0;
}

// Hands the outputs of this thread over, two neighbours of a row at a time.
template <class Way, class Tail>
__device__ __forceinline__ void hand_over(const Sums<Way>& sums, const Shared<Way>& shared,
                                          const Place& at, const Tail& tail) {
  const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = 16 * warp + Rows<Way>::row_of_eight(lane / 4) + 8 * r, exponent = shared.e[i];
#pragma unroll
    for (int h = 0; h < Way::Columns / kWide; ++h)
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
template <class Way, class Tail>
__global__ void __launch_bounds__(kThreads, 1)
    split_gemm_kernel(const __grid_constant__ Operands p, const __grid_constant__ Tail tail) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared<Way>& shared = reinterpret_cast<Shared<Way>&>(memory);
  const Place at = place_of<Way>(p);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  if (threadIdx.x < hopper::kWarpgroup) {
    hopper::give_registers<40>();
    if (threadIdx.x == 0) copy_panels(shared, p, at);
  } else {
    hopper::take_registers<232>();
    take_exponents(shared, p, at);
    float sums[Way::Columns / kWide][64];
    if constexpr (Way::Through)
      multiply_through(sums, shared, at);
    else if constexpr (Way::Raw && Way::Products == 1)
      multiply_raw(sums[0], shared, p, at);
    else
      multiply_by_turns(sums, shared, p, at);
    hopper::meet<3>();
    hand_over<Way>(sums, shared, at, tail);
    tail.template finish<Way::Columns>(shared.f, at.row, at.column);
  }
}

}  // namespace split_gemm
