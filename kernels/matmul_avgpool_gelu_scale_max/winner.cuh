// Which u of a sample wins, from parts of a product, and its value once more in double: by a block.
#pragma once
#include "parts.cuh"
#include "reduce.cuh"

constexpr int kNowhere = 0x7fffffff;

// Of a chunk of Threads Width features at most, the u of first + threadIdx.x Width + c; false for threads
// beyond. A team of threads adds some of the parts; teams are as many as there is room for.
template <int Threads, int Width>
__device__ __forceinline__ bool u_of_chunk(float (&u)[Width], const PoolChain& p, int64_t i,
                                           int64_t first) {
  __shared__ double shares[Threads * Width];  // (teams, count)
  const int count = static_cast<int>(min(p.M - first, int64_t{Threads * Width}));
  const int across = (count + Width - 1) / Width, teams = Threads / across;
  const int team = threadIdx.x / across, m = threadIdx.x % across * Width;
  double sum[Width];
  if (team < teams) share_of_parts(sum, p, i, first + m, team, teams);
  if (teams > 1) {  // then no chunk comes behind
    for (int c = 0; c < Width && team < teams; ++c) shares[team * count + m + c] = sum[c];
    __syncthreads();
    for (int t = 1; t < teams && team == 0; ++t)
#pragma unroll
      for (int c = 0; c < Width; ++c) sum[c] += shares[t * count + m + c];
  }
  if (team > 0) return false;
#pragma unroll
  for (int c = 0; c < Width; ++c) u[c] = static_cast<float>(sum[c] + p.b[first + m + c]);
  return true;
}

// u[i,m] in double: the share of a thread that stands at `start`, the next one `step` further on.
// The bias is with the first.
template <int Width>
__device__ __forceinline__ double share_of_u(const PoolChain& p, int64_t i, int64_t m,
                                             int64_t start, int64_t step) {
  const float *x = p.x + i * p.x_stride, *w = p.w + m * p.K;
  double sum = start ? 0.0 : p.b_exact ? p.b_exact[m] : p.b[m];
#pragma unroll 4
  for (int64_t k = start; k < p.K; k += step) {
    float a[Width], b[Width];
    load_once<Width>(a, x + k, true);
    if (p.w_exact) {
      sum = dot<Width>(a, p.w_exact + m * p.K + k, sum);
    } else {
      load_once<Width>(b, w + k, true);
#pragma unroll
      for (int j = 0; j < Width; ++j) sum = fma(static_cast<double>(a[j]), double(b[j]), sum);
    }
  }
  return sum;
}

// Of finite ends, where the right one is not below 0, it wins: no GELU says so.
__device__ __forceinline__ bool is_plain(const Ends<float>& e, double scale) {
  return scale >= 0 && scale - scale == 0 && e.right >= 0 && e.right - e.right == 0 &&
         e.left - e.left == 0;
}

// (y, the u that wins) of a sample's ends, for the lanes of a warp, which take one of the two each.
__device__ __forceinline__ float2 best_of(const Ends<float>& e, double scale) {
  const bool takes_left = threadIdx.x % 2 == 0 && !is_plain(e, scale);
  const double mine = scaled(takes_left ? e.left : e.right, scale);
  const double other = __shfl_xor_sync(kFullWarp, mine, 1);
  const double left = takes_left ? mine : other, right = takes_left ? other : mine;
  return make_float2(static_cast<float>(larger(left, right)), right >= left ? e.right : e.left);
}

// y[i] from a sample's ends, by all threads of a block: that of the u that wins as it is, or computed
// `again`. find(u, place): place is made the least m that has this u, by whom it belongs to.
template <int Threads, int Width, class Find>
__device__ __forceinline__ void finish_sample(const PoolChain& p, int64_t i, const Ends<float>& ends,
                                              bool again, const Find& find) {
  __shared__ float2 best;
  __shared__ int place;
  __shared__ double scratch[Threads / kWarp];
  float winner = ends.right;
  if (threadIdx.x == 0) place = kNowhere;
  if (!again || !is_plain(ends, p.scale)) {
    if (threadIdx.x < kWarp) {
      const float2 found = best_of(ends, p.scale);
      if (threadIdx.x == 0) p.y[i] = found.x, best = found;
    }
    __syncthreads();
    if (!again || best.x - best.x != 0) return;  // NaN and infinities stay
    winner = best.y;
  } else {
    __syncthreads();
  }
  find(winner, place);
  __syncthreads();
  const double u = block_sum<Threads>(
      share_of_u<Width>(p, i, place, threadIdx.x * Width, Threads * Width), scratch);
  if (threadIdx.x == 0) p.y[i] = static_cast<float>(p.scale * gelu(u));
}
