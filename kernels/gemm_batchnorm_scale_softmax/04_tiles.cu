// Rung 4: a row by tiles, each reduced to (m, s) by itself, as the tiles of a matrix product would
// be; a second launch merges the parts of a row and writes.
//   t = a (z + shift) + d;  (m, s) of each tile;  (M, S) their merge;  y = exp(t - M) / S
// Who owns what: a block of 128 threads owns a tile of 1024 features of a sample.
// Moves: z twice, y once, 12 B N bytes; 8 bytes a tile and sample.
// Against rung 3: a long row has many blocks, not one. A row that registers hold moves a third less
//   in rung 3, and goes there.
#include "03_row_in_registers.cu"
#include "fold.cuh"
#include "load_row.cuh"

constexpr int kThreads = 128, kEach = kTile / kThreads;

template <int Width, bool Finish>
__global__ void __launch_bounds__(kThreads) map_softmax_tile_kernel(Tail p) {
  wait_for_previous();
  static_assert(kEach % Width == 0, "whole loads");
  Partial* parts = reinterpret_cast<Partial*>(p.partial);
  for (int64_t job = blockIdx.x; job < p.B * p.tiles; job += gridDim.x) {
    const int64_t i = job / p.tiles, n = job % p.tiles * kTile + threadIdx.x * Width;
    float* row = p.y + i * p.N;
    float t[kEach / Width][Width];
    Partial part;
    part.m = take<kThreads, Finish>(t, p, row, n);
    if (!Finish) {
      part.s = exp_sum<kThreads>(t, origin(part.m), p.N - n);
      part = merge_team<kThreads>(part);
      if (threadIdx.x == 0) parts[job] = part;
      continue;
    }
    part = Partial{};
    for (int64_t tile = threadIdx.x; tile < p.tiles; tile += kThreads)
      part = merge(part, parts[i * p.tiles + tile]);
    part = merge_team<kThreads>(part);
    exp_sum<kThreads>(t, origin(part.m), p.N - n);
    give<kThreads>(row + n, t, 1.f / part.s, p.N - n);
  }
}

template <int Width>
cudaError_t launch_tiles(const Tail& p, cudaStream_t stream) {
  const unsigned blocks = blocks_for(p.B * p.tiles);
  const auto reduce = map_softmax_tile_kernel<Width, false>;
  const auto write = map_softmax_tile_kernel<Width, true>;
  const cudaError_t error = launch_dependent(reduce, blocks, kThreads, 0, stream, p);
  return error != cudaSuccess ? error : launch_dependent(write, blocks, kThreads, 0, stream, p);
}

cudaError_t launch(const Tail& p, cudaStream_t stream) {
  if (p.N <= 512 * kHeld) return launch_rows(p, stream);
  return is_float4(p) ? launch_tiles<4>(p, stream) : launch_tiles<1>(p, stream);
}
