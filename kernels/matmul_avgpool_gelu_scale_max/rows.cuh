// A tail for many samples: a warp owns one, with no barrier and no shared memory. Its result is u's
// own, not computed again.
#pragma once
#include "dependent_launch.cuh"
#include "winner.cuh"

constexpr int kRowsThreads = 256;

// Of a sample's chunks of a warp's features as many at once as make kPartsInFlight loads with their
// Parts parts, which may be fewer.
template <int Parts, int Width>
__global__ void __launch_bounds__(kRowsThreads, 3) parts_rows_gelu_scale_kernel(PoolChain p) {
  constexpr int kChunks = kPartsInFlight / Parts, kStep = kWarp * Width;
  wait_for_previous();
  const int64_t i = (int64_t{blockIdx.x} * kRowsThreads + threadIdx.x) / kWarp;
  if (i >= p.B) return;
  const bool dips = p.scale < 0;
  const int lane = threadIdx.x % kWarp;
  Ends<float> ends = no_ends<float>(dips);
  for (int64_t first = lane * Width; first < p.M; first += kChunks * kStep) {
    float v[kChunks][Parts][Width];
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int s = 0; s < Parts; ++s)
        load_once<Width>(v[c][s], p.u_parts + (s * p.B + i) * p.M + first + c * kStep,
                         s < p.parts && first + c * kStep < p.M);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int64_t m = first + c * kStep;
      if (m >= p.M) break;
#pragma unroll
      for (int w = 0; w < Width; ++w) {
        float u = v[c][0][w] + p.b[m + w];
        if constexpr (Parts > 1) {
          double sum = p.b[m + w];
#pragma unroll
          for (int s = 0; s < Parts; ++s) sum += v[c][s][w];
          u = static_cast<float>(sum);
        }
        ends = joined(ends, ends_of(u, dips), dips);
      }
    }
  }
  const float2 found = best_of(team_ends<kWarp>(ends, dips), p.scale);
  if (lane == 0) p.y[i] = found.x;
}

template <int Parts>
cudaError_t launch_rows(const PoolChain& p, bool wide, cudaStream_t stream) {
  const auto kernel =
      wide ? parts_rows_gelu_scale_kernel<Parts, 4> : parts_rows_gelu_scale_kernel<Parts, 1>;
  const int64_t blocks = (p.B * kWarp + kRowsThreads - 1) / kRowsThreads;
  return launch_dependent(kernel, static_cast<unsigned>(blocks), kRowsThreads, 0, stream, p);
}

// The tail for as many parts as kPartsInFlight at most.
inline cudaError_t launch_rows(const PoolChain& p, bool wide, cudaStream_t stream) {
  if (p.parts <= 1) return launch_rows<1>(p, wide, stream);
  if (p.parts <= 2) return launch_rows<2>(p, wide, stream);
  return p.parts <= 4 ? launch_rows<4>(p, wide, stream) : launch_rows<8>(p, wide, stream);
}
