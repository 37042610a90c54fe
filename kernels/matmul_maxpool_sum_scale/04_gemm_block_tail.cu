// Rung 4: the product by torch, whole; a block per row for what is left. Any pool.
//   y[i] = scale sum_w max_j z[i, w pool + j],   z = x W^T + b from memory
// Who owns what: a block owns a row of z. Of pools of 2 and 4 a thread takes every 512th four features;
//   else every 512th window; of windows longer than a warp, a warp takes every 16th and its lanes
//   share the features. Eight of those are in flight.
// Moves: z once, 4 B N bytes, neighbours by neighbouring threads; much of it is in L2.
// Against rung 3: B blocks instead of B threads, and a row is read by all of a block.
//   What remains is the product itself: 2 B K N operations.
// With WB_BIAS z is x W^T alone, a product of ours; b is then read for each row, from L2.
#include "tail.cuh"

template <int Pool>  // 0: any
__global__ void __launch_bounds__(kThreads, 2) maxpool_sum_scale_block_kernel(Pooled p) {
  __shared__ double scratch[kWarps];
  for (int64_t i = blockIdx.x; i < p.B; i += gridDim.x) {
    const float* z = p.z + i * p.N;
    double sum;
    if constexpr (Pool == 0)
      sum = sum_of_windows(p, z);
    else
      sum = sum_of_vectors<Pool>(p, z);
    sum = block_sum<kThreads>(sum, scratch);
    if (threadIdx.x == 0) p.y[i] = scaled(sum, p.scale);
    __syncthreads();  // before the next row uses scratch
  }
}

cudaError_t launch(const Pooled& p, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(p.B < (1 << 30) ? p.B : (1 << 30));
  const bool wide = reads_by_vectors(p);
  const auto kernel = wide && p.pool == 2   ? maxpool_sum_scale_block_kernel<2>
                      : wide && p.pool == 4 ? maxpool_sum_scale_block_kernel<4>
                                            : maxpool_sum_scale_block_kernel<0>;
  kernel<<<blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}
