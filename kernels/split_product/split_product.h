// z[part,i,n] = 2^(e[i] + f[n]) sum_{k of part} (xh wl + xl wh + xh wh)[k], or of xh wh alone, from
// matrices that were split in two halves each; or of x W as they are, rounded to TF32. The header knows
// neither torch nor Hopper's instructions.
#pragma once
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "halves.h"

struct SplitProduct {
  const half *xh, *xl;  // (2 pairs, B rounded up to 8, 32), swizzled, zeros behind K; or null: then
  const int8_t* c;      // (64 pairs): exponents of columns, and x is split where it is multiplied
  const half *wh, *wl;  // (2 pairs, N rounded up to 8, 32); no wl: one product, xh wh; no wh: x W
  const int *e, *f;     // (B), (N); f is kNotFinite for a row of W that is not
  const float *x, *W;   // (B, K), (N, K): as they were; W is read for such rows, or multiplied
  float* z;             // (parts, B, N) contiguous
  int64_t B, K, N, x_stride, W_stride, parts;
  // Of 64 of k, what a tensor core accumulates: 1; more, of three products, to be measured; 0, of one
  // product of a split x: all of k.
  int64_t promote;
};

cudaError_t launch(const SplitProduct& p, cudaStream_t stream);
