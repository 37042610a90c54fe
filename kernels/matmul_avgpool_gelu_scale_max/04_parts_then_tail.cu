// Rung 4: the product's sum over k in parts, as a batch of products; the tail adds them in double.
//   u[i,m] = sum_s u_parts[s,i,m] + b[m];  y[i] = max_m scale * gelu(u[i,m])
// Who owns what: a team of threads owns a sample, 128 (a block) for long rows, 32 (a warp) for short
//   ones. A thread takes 4 neighbouring u at once and asks for 8 parts of them before it uses any.
// Moves: the parts once more, 4 parts B M bytes, which the product has just left in L2.
// Against rung 3: as many times the tiles of the product as parts, so that none of the GPU's processors waits;
//   chains of additions shorter by the same factor; loads by 16 bytes; no tree, but shuffles.
#include "parts.cuh"

constexpr int kThreads = 128, kShortRow = 256;

template <int Team, int Width>  // threads a sample; floats a load
__global__ void __launch_bounds__(kThreads) parts_gelu_scale_max_kernel(PoolChain p) {
  constexpr int kTeams = kThreads / Team;
  const int lane = threadIdx.x % Team;
  const int64_t i = blockIdx.x * static_cast<int64_t>(kTeams) + threadIdx.x / Team;
  const bool dips = p.scale < 0;
  Ends<float> ends = no_ends<float>(dips);
  for (int64_t m = lane * Width; i < p.B && m < p.M; m += Team * Width) {
    float u[Width];
    u_of_parts(u, p, i, m);
#pragma unroll
    for (int c = 0; c < Width; ++c) ends = joined(ends, ends_of(u[c], dips), dips);
  }
  ends = team_ends<Team>(ends, dips);
  if (lane == 0 && i < p.B) p.y[i] = highest(ends, p.scale);
}

template <int Team>
cudaError_t launch_team(const PoolChain& p, cudaStream_t stream) {
  constexpr int kTeams = kThreads / Team;
  const int64_t blocks = (p.B + kTeams - 1) / kTeams;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;  // the grid's limit in x
  auto kernel = rows_are_float4(p.u_parts, p.M, p.M) ? parts_gelu_scale_max_kernel<Team, 4>
                                                     : parts_gelu_scale_max_kernel<Team, 1>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch(const PoolChain& p, cudaStream_t stream) {
  return p.M <= kShortRow ? launch_team<32>(p, stream) : launch_team<kThreads>(p, stream);
}
