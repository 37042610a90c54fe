// Rung 2: the maximum first, then the sum of exp, then the division: three walks along the row.
//   t = a (z + shift) + d;  m = max_n t[n];  s = sum_n exp(t[n] - m);  y = exp(t - m) / s
// Who owns what: a block owns a sample, its threads walk the row together.
// Moves: the row is read and written three times, 24 B N bytes, but for the first mostly in L2.
// Against rung 1: no overflow, since the largest exponent is 0; one more walk.
#include "row.cuh"

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) map_softmax_three_walks_kernel(Tail p) {
  for (int64_t i = blockIdx.x; i < p.B; i += gridDim.x) {
    float* y = p.y + i * p.N;
    Partial largest;
    for (int64_t n = threadIdx.x; n < p.N; n += kThreads)
      largest.m = fmaxf(largest.m, y[n] = mapped(p, n, y[n]));
    const float m = merge_team<kThreads>(largest).m;
    Partial part{m, 0.f};
    for (int64_t n = threadIdx.x; n < p.N; n += kThreads) part.s += y[n] = expf(y[n] - m);
    const float sum = merge_team<kThreads>(part).s;
    for (int64_t n = threadIdx.x; n < p.N; n += kThreads) y[n] /= sum;
  }
}

cudaError_t launch(const Tail& p, cudaStream_t stream) {
  map_softmax_three_walks_kernel<<<blocks_for(p.B), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
