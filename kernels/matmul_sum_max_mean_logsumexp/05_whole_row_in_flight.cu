// Rung 5: one wave of blocks, and each thread has as many loads in flight as its registers hold.
//   y[i] = sum_k x[i,k] w_sum[k] + b_sum
// Who owns what: a team of threads owns a row, 128 (a block) for long rows, 32 (a warp) for short
//   ones. A thread may ask for 16 times 16 bytes of x before it uses any; the compiler keeps four
//   or five of them, with their w_sum, in the 64 registers that kResident leaves it.
// Moves: x once, 4 B K bytes, past L1, where w_sum stays: 8 K bytes for each multiprocessor.
// At K = 8192 all 1024 blocks are resident at once: no second wave, no tail.
// Against rung 4: four rows no longer wait for one another at a barrier, and no block is left over.
#include "load.cuh"
#include "problem.h"
#include "reduce.cuh"

constexpr int kThreads = 128, kInFlight = 16, kShortRow = 2048;
constexpr int kResident = 8;  // blocks of a multiprocessor: 64 registers a thread to hold loads in

template <int Team, int Width>  // threads a row; floats a load
__global__ void __launch_bounds__(kThreads, kResident) dot_whole_row_in_flight_kernel(SumChain p) {
  static_assert(Team == kWarp || Team == kThreads, "a team adds by one warp's or one block's sum");
  constexpr int kTeams = kThreads / Team;
  const int lane = threadIdx.x % Team;
  const int64_t i = blockIdx.x * static_cast<int64_t>(kTeams) + threadIdx.x / Team;
  const float* x = p.x + i * p.x_stride;
  double sum = 0;
  for (int64_t start = lane * Width; i < p.B && start < p.K; start += Team * Width * kInFlight) {
    float v[kInFlight][Width];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int64_t k = start + u * Team * Width;
      load_once<Width>(v[u], x + k, k < p.K);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int64_t k = start + u * Team * Width;
      if (k < p.K) sum = dot<Width>(v[u], p.w_sum + k, sum);
    }
  }
  __shared__ double scratch[kThreads / kWarp];
  sum = Team == kWarp ? warp_sum(sum) : block_sum<kThreads>(sum, scratch);
  if (lane == 0 && i < p.B) p.y[i] = static_cast<float>(sum + *p.b_sum);
}

template <int Team>
cudaError_t launch_team(const SumChain& p, cudaStream_t stream) {
  constexpr int kTeams = kThreads / Team;
  const int64_t blocks = (p.B + kTeams - 1) / kTeams;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;  // the grid's limit in x
  auto kernel = rows_are_float4(p.x, p.x_stride, p.K) ? dot_whole_row_in_flight_kernel<Team, 4>
                                                      : dot_whole_row_in_flight_kernel<Team, 1>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch(const SumChain& p, cudaStream_t stream) {
  return p.K <= kShortRow ? launch_team<kWarp>(p, stream) : launch_team<kThreads>(p, stream);
}
