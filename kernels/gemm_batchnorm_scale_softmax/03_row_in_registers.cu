// Rung 3: online, in one walk: a thread has (m, s) of what it holds, the row stays in registers.
//   (m, s) and (m', s') merge to (M, s e^(m-M) + s' e^(m'-M)), M = max(m, m'), in any grouping;
//   y = e^(t-m) e^(m-M) / s, t = a (z + shift) + d, m the thread's own maximum
// Who owns what: a team of threads owns a row: a warp up to 1024 features, else 128 or 512 threads,
//   which hold 16384; a longer row goes by pieces of that, and is read again to be written.
// Moves: z once, y once, 8 B N bytes; the map, 12 N bytes, from L1.
// Against rung 2: a third of the bytes, and one reduction instead of two.
#include "dependent_launch.cuh"
#include "load_row.cuh"

constexpr int kHeld = 32;                                               // floats a thread holds
constexpr int threads_of(int team) { return team < 128 ? 128 : team; }  // of a block

template <int Team, int Width>
__global__ void __launch_bounds__(threads_of(Team)) map_softmax_row_kernel(Tail p) {
  wait_for_previous();
  const int64_t i = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) / Team;
  if (i >= p.B) return;  // whole warps; where a block is several teams, nobody waits in it
  const int64_t first = threadIdx.x % Team * Width;
  const bool held = p.N <= Team * kHeld;
  float* row = p.y + i * p.N;
  float t[kHeld / Width][Width];
  Partial part;
  for (int64_t n = first; n < p.N; n += Team * kHeld) {
    Partial piece;
    piece.m = take<Team, true>(t, p, row, n);
    piece.s = exp_sum<Team>(t, origin(piece.m), p.N - n);
    part = held ? piece : merge(part, piece);
  }
  const Partial whole = merge_team<Team>(part);
  if (!held) part.m = whole.m;
  const float factor = expf(part.m - whole.m) / whole.s;  // NaN where all is -inf, as in torch
  for (int64_t n = first; n < p.N; n += Team * kHeld) {
    if (!held) {
      take<Team, true>(t, p, row, n);
      exp_sum<Team>(t, origin(whole.m), p.N - n);
    }
    give<Team>(row + n, t, factor, p.N - n);
  }
}

template <int Team>
cudaError_t launch_team(const Tail& p, cudaStream_t stream) {
  constexpr int kThreads = threads_of(Team), kTeams = kThreads / Team;
  if (p.B > INT32_MAX) return cudaErrorInvalidConfiguration;  // the grid's limit in x
  auto kernel = is_float4(p) ? map_softmax_row_kernel<Team, 4> : map_softmax_row_kernel<Team, 1>;
  const unsigned blocks = static_cast<unsigned>((p.B + kTeams - 1) / kTeams);
  return launch_dependent(kernel, blocks, kThreads, 0, stream, p);
}

cudaError_t launch_rows(const Tail& p, cudaStream_t stream) {
  if (p.N > 128 * kHeld) return launch_team<512>(p, stream);
  return p.N > 32 * kHeld ? launch_team<128>(p, stream) : launch_team<32>(p, stream);
}

#ifndef WB_TILES  // rung 4 includes this file and decides
cudaError_t launch(const Tail& p, cudaStream_t stream) { return launch_rows(p, stream); }
#endif
