// An input as two matrices of halves, with an exponent a row:
//   x[i,k] 2^c[k] = 2^e[i] (hi[i,k] + lo[i,k]),  the row's largest in [2^14, 2^15) before 2^e
// c is an exponent a column that weights are divided by. What is 2^-40 of the row's largest and less is
// lost: halves end at 2^-24. The layout of hi and lo: halves.cuh; zeros behind K.
#pragma once
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

struct SplitRows {
  const float* x;       // (rows, K), rows x_stride apart
  const int8_t* c;      // (K)
  const float* centre;  // (K), or null: (x - centre) / 2 is split
  half *hi, *lo;        // lo may be null
  int* e;               // (rows)
  int64_t rows, K, x_stride;
};

cudaError_t launch(const SplitRows& p, cudaStream_t stream);
