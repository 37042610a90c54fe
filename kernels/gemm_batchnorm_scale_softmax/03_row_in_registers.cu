// Rung 3: online, in one walk: a thread has (m, s) of what it holds, the row stays in registers.
//   (m, s) and (m', s') merge to (M, s e^(m-M) + s' e^(m'-M)), M = max(m, m'), in any grouping;
//   y = e^(t-m) e^(m-M) / s, t = a (z + shift) + d, m the thread's own maximum
// Who owns what: a team of threads owns a row: a warp up to 1024 features, else 128 or 512 threads.
// Moves: z once, y once, 8 B N bytes; the map, 12 N bytes, from L1.
// Assumes: N <= 16384; the launcher refuses longer rows.
// Against rung 2: a third of the bytes, and one reduction instead of two.
#include "load_row.cuh"

constexpr int kHeld = 32;  // floats a thread holds
constexpr int64_t kLongest = 512 * kHeld;
constexpr int threads_of(int team) { return team < 128 ? 128 : team; }  // of a block

template <int Team, int Width>
__global__ void __launch_bounds__(threads_of(Team)) map_softmax_row_kernel(Tail p) {
  constexpr int kLoads = kHeld / Width, kStep = Team * Width;
  const int64_t row = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) / Team;
  if (row >= p.B) return;  // whole warps; where a block is several teams, nobody waits in it
  const int first = threadIdx.x % Team * Width, left = static_cast<int>(p.N) - first;
  float* y = p.y + row * p.N + first;
  float t[kLoads][Width];
  Partial part;
#pragma unroll
  for (int u = 0; u < kLoads; ++u)
    if (u * kStep < left) load_row<Width>(t[u], y + u * kStep);
#pragma unroll
  for (int u = 0; u < kLoads; ++u)
    if (u * kStep < left) {
      map_row<Width>(t[u], p, first + u * kStep);
      part.m = max_of<Width>(t[u], part.m);
    }
#pragma unroll
  for (int u = 0; u < kLoads; ++u)
    if (u * kStep < left) part.s += exp_sum<Width>(t[u], origin(part.m));
  const Partial whole = merge_team<Team>(part);
  const float factor = expf(part.m - whole.m) / whole.s;  // NaN where all is -inf, as in torch
#pragma unroll
  for (int u = 0; u < kLoads; ++u)
    if (u * kStep < left) store_row<Width>(y + u * kStep, t[u], factor);
}

template <int Team>
cudaError_t launch_team(const Tail& p, cudaStream_t stream) {
  constexpr int kThreads = threads_of(Team), kTeams = kThreads / Team;
  if (p.B > INT32_MAX) return cudaErrorInvalidConfiguration;  // the grid's limit in x
  auto kernel = is_float4(p) ? map_softmax_row_kernel<Team, 4> : map_softmax_row_kernel<Team, 1>;
  kernel<<<static_cast<unsigned>((p.B + kTeams - 1) / kTeams), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_rows(const Tail& p, cudaStream_t stream) {
  if (p.N > kLongest) return cudaErrorInvalidValue;
  if (p.N > 128 * kHeld) return launch_team<512>(p, stream);
  return p.N > 32 * kHeld ? launch_team<128>(p, stream) : launch_team<32>(p, stream);
}

#ifndef WB_TILES  // with tiles beside, rung 4 decides
cudaError_t launch(const Tail& p, cudaStream_t stream) { return launch_rows(p, stream); }
#endif
