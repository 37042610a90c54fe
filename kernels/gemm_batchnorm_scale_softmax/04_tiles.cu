// Rung 4: a row of any length by tiles, each reduced to (m, s) by itself, as the tiles of a matrix
// product would be; a second launch merges the parts of a row and writes.
//   t = a (z + shift) + d;  (m, s) of each tile;  (M, S) their merge;  y = exp(t - M) / S
// Who owns what: a block of 128 threads owns a tile of 1024 features of a sample.
// Moves: z twice, y once, 12 B N bytes; 8 bytes a tile and sample.
// Against rung 3: a row may be longer than the registers. One that fits moves a third less there.
#include "load_row.cuh"

constexpr int kThreads = 128, kEach = kTile / kThreads;

template <int Width, bool Finish>
__global__ void __launch_bounds__(kThreads) map_softmax_tile_kernel(Tail p) {
  static_assert(kEach % Width == 0, "whole loads");
  constexpr int kLoads = kEach / Width, kStep = kThreads * Width;
  Partial* parts = reinterpret_cast<Partial*>(p.partial);
  for (int64_t job = blockIdx.x; job < p.B * p.tiles; job += gridDim.x) {
    const int64_t row = job / p.tiles, first = job % p.tiles * kTile + threadIdx.x * Width;
    float* y = p.y + row * p.N + first;
    const int64_t left = p.N - first;  // features from this thread's first on
    float t[kLoads][Width];
    Partial part;
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      if (u * kStep >= left) continue;
      load_row<Width, Finish>(t[u], y + u * kStep);
      map_row<Width>(t[u], p, first + u * kStep);
      if (!Finish) part.m = max_of<Width>(t[u], part.m);
    }
    for (int64_t k = threadIdx.x; Finish && k < p.tiles; k += kThreads)
      part = merge(part, parts[row * p.tiles + k]);
    if (Finish) part = merge_team<kThreads>(part);
    const float m = origin(part.m), factor = 1.f / part.s;
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      if (u * kStep >= left) continue;
      const float sum = exp_sum<Width>(t[u], m);
      Finish ? store_row<Width>(y + u * kStep, t[u], factor) : void(part.s += sum);
    }
    if (!Finish) part = merge_team<kThreads>(part);
    if (!Finish && threadIdx.x == 0) parts[job] = part;
  }
}

template <int Width>
cudaError_t launch_tiles(const Tail& p, cudaStream_t stream) {
  const unsigned blocks = blocks_for(p.B * p.tiles);
  map_softmax_tile_kernel<Width, false><<<blocks, kThreads, 0, stream>>>(p);
  map_softmax_tile_kernel<Width, true><<<blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch(const Tail& p, cudaStream_t stream) {
  if (p.N <= kLongest) return launch_rows(p, stream);
  return is_float4(p) ? launch_tiles<4>(p, stream) : launch_tiles<1>(p, stream);
}
