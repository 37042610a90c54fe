// z = x W^T in float32's accuracy on the tensor cores of a Hopper GPU, for any tail.
//   x[i,k] 2^c[k] = 2^e (xh[i,k] + xl[i,k]),  W[n,k] 2^-c[k] = 2^f[n] (wh[n,k] + wl[n,k]),
//   h and l in half;  z[i,n] = 2^f[n] sum_k 2^e (xh wl + xl wh + xh wh)[k]
// A tensor core rounds what it accumulates toward zero, in every instruction. So it accumulates over
// 64 of k only, small terms first, and the sum of these goes on in ordinary float32 registers, that
// round to nearest ("promotion"). Longer intervals are there to be measured, with tiles of 128 columns.
// Who owns what: a block owns a tile of 128 x Columns outputs, over one part of k. One thread asks the
//   copy engine for panels of 32 of k, some stages ahead. Two warpgroups own 64 rows each and
//   multiply, 128 columns at a time. They take turns: while one promotes, waits and begins again, the
//   other's products run.
// Two ways to take x. Split: xh, xl were made before, with an exponent a row. Raw: x as it is; each
//   thread splits what it multiplies, with an exponent for each row and 64 of k, which costs
//   registers (128 columns, not 256) and no walk over x.
// Moves: a block reads 512 + 4 Columns bytes of L2 for each of k. Blocks with the same columns run side
//   by side, so that W comes from memory once.
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
    hopper::expect(full, sizeof(stage));
    if constexpr (Raw) {
      hopper::load_box(stage.x, p.x, panel * kPanel, at.row, full);
    } else {
      hopper::load_box(stage.x[0], p.x, 0, row, panel, full);
      hopper::load_box(stage.x[1], p.xl, 0, row, panel, full);
    }
    hopper::load_box(stage.wl, p.wl, 0, column, panel, full);
    hopper::load_box(stage.wh, p.wh, 0, column, panel, full);
  }
}

// --- the products -----------------------------------------------------------------------------------

// part (64, 128) <- or += the three products of a pair of panels, for columns from n on. At the end the
// other warpgroup's turn is over the last of them: they keep the tensor cores busy meanwhile.
template <int Columns, class Rows>
__device__ __forceinline__ void multiply_pair(float (&part)[64], const Rows& x,
                                              const Stage<Columns>* pair, int n, int mine,
                                              bool add) {
  hopper::take_turn(mine);
  hopper::fence_products();
  x.template multiply<0>(part, 0, pair[0].wl + n, add);
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
                                                Shared<Columns>& shared, const Operands& p,
                                                const Place& at) {
  using Rows = std::conditional_t<Raw, RawRows<Columns>, SplitRows<Columns>>;
  constexpr int kStages = Shared<Columns>::kStages, kTurns = Columns / kWide;
  constexpr bool kIsLong = kTurns == 1 && !Raw;  // what is not promoted stays in the one `part`
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
    const Rows x(shared, s, mine, p.c + (at.first + i) * 2 * kPanel);
#pragma unroll
    for (int h = 0; h < kTurns; ++h) {
      const bool add = kIsLong && i % p.promote > 0;
      multiply_pair(part, x, shared.stages + s, h * kWide, mine, add);
      __syncwarp();
      if (h + 1 == kTurns && lane == 0) {  // this warp has read them
        hopper::arrive(&shared.empty[s]);
        hopper::arrive(&shared.empty[s + 1]);
      }
      if (!kIsLong || (i + 1) % p.promote == 0 || i + 1 == at.pairs) x.promote(sums[h], part, base);
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
    multiply_panels<Columns, Raw>(sums, shared, p, at);
    hopper::meet<3>();
    hand_over(sums, shared, at, tail);
    tail.template finish<Columns>(shared.f, at.row, at.column);
  }
}

}  // namespace split_gemm
