// Rung 5: the product only has to find which u wins; its value is computed once more, in double.
//   u[i,m] = sum_s u_parts[s,i,m] + b[m];  m' = the one that wins;
//   y[i] = scale * gelu(sum_k x[i,k] w_exact[m',k] + b_exact[m'])
// Who owns what: a block owns a sample: 128 threads, 32 where its rows are short, 512 where groups are
//   many, 1024 where samples are few and their rows long. Teams of them share the parts. Of many
//   samples that go without the second value a warp owns one.
// Moves: the parts as rung 4; where it computes again, 12 K bytes a sample more, mostly from L2.
// Against rung 4: the error is the answer's own rounding; a GELU only where a comparison does not say
//   who wins. A large batch with many groups goes without the second value: there it would cost a
//   tenth of the library's product, and the largest of many is far from 0.
#include "rows.cuh"
constexpr int kManyGroups = 256, kAtOnce = 512;  // M; of 128 threads, four each
constexpr int64_t kManySamples = 1024;
constexpr int64_t kCheap = 1 << 21, kShortRow = 1024;  // elements of x; K
constexpr int64_t kFew = 128, kLongRow = 4096;         // samples, which leave processors idle; K

template <int Threads, int Width>  // threads a sample; floats a load
__global__ void __launch_bounds__(Threads, 1024 / Threads)
    parts_winner_gelu_scale_kernel(PoolChain p, bool again) {
  constexpr int64_t kChunk = Threads * Width;
  wait_for_previous();
  const bool dips = p.scale < 0;
  const int64_t i = blockIdx.x, mine = threadIdx.x * Width;
  float u[Width];
  bool has = false;
  Ends<float> ends = no_ends<float>(dips);
  for (int64_t chunk = 0; chunk < p.M; chunk += kChunk) {
    has = u_of_chunk<Threads>(u, p, i, chunk);
    for (int c = 0; c < Width && has; ++c) ends = joined(ends, ends_of(u[c], dips), dips);
  }
  ends = team_ends<Threads>(ends, dips);
  finish_sample<Threads, Width>(p, i, ends, again, [&](float winner, int& place) {
    for (int64_t chunk = 0; chunk < p.M; chunk += kChunk) {
      if (p.M > kChunk) has = u_of_chunk<Threads>(u, p, i, chunk);
      for (int c = 0; c < Width && has; ++c)
        if (u[c] == winner) atomicMin(&place, static_cast<int>(chunk + mine + c));
    }
  });
}

template <int Threads>
cudaError_t launch_threads(const PoolChain& p, bool again, bool even, cudaStream_t stream) {
  const bool wide =
      even && rows_are_float4(p.w, p.K, p.K) && rows_are_float4(p.x, p.x_stride, p.K);
  const auto kernel = wide ? parts_winner_gelu_scale_kernel<Threads, 4>
                           : parts_winner_gelu_scale_kernel<Threads, 1>;
  return launch_dependent(kernel, static_cast<unsigned>(p.B), Threads, 0, stream, p, again);
}

cudaError_t launch(const PoolChain& p, cudaStream_t stream) {
  if (p.B > kNowhere || p.M > kNowhere) return cudaErrorInvalidConfiguration;
  const bool again = p.M < kManyGroups || p.B * p.K <= kCheap;
  const bool even = rows_are_float4(p.u_parts, p.M, p.M);
  if (!again && p.B >= kManySamples && p.parts <= kPartsInFlight) return launch_rows(p, even, stream);
  if (p.K <= kShortRow && p.M <= kManyGroups) return launch_threads<kWarp>(p, again, even, stream);
  if (p.B <= kFew && p.K >= kLongRow) return launch_threads<1024>(p, again, even, stream);
  return p.M > kAtOnce ? launch_threads<512>(p, again, even, stream)
                       : launch_threads<128>(p, again, even, stream);
}
