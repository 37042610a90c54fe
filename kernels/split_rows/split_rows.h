// A matrix as two matrices of halves, with an exponent a row:
//   v[i,k] 2^(+-c[k]) = 2^e[i] (hi[i,k] + lo[i,k]),  the row's largest in [2^14, 2^15) before 2^e
// c is an exponent a column that weights are divided by and inputs multiplied with. What is 2^-40 of
// the row's largest and less is lost: halves end at 2^-24. Of weights, e is kNotFinite where the row
// holds an infinity or NaN: the product then takes the row as it is.
// hi and lo stand by panels of 32 columns, (2 pairs, rows rounded up to 8, 32), zeros behind K, as
// products read them; of row r the 16 bytes c stand at c ^ (r / 2 % 4).
#pragma once
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

constexpr int kNotFinite = 1 << 20;

struct SplitRows {
  const void* v;        // (rows, K) float or double, rows v_stride apart
  const int8_t* c;      // (K)
  const float* centre;  // (K), or null: (v - centre) / 2 is split, of float alone
  half *hi, *lo;
  int* e;  // (rows)
  int64_t rows, K, v_stride;
  bool is_double, divide;
};

cudaError_t launch(const SplitRows& p, cudaStream_t stream);
