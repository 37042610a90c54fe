// c[k] <- the exponent above the largest finite |v[:,k]|: |v| 2^-c < 1; 0 for a column of zeros.
// Within [-126, 126], so that 2^c and 2^-c are ordinary numbers.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

struct ColumnExponents {
  const void* v;  // (rows, K) float or double, rows v_stride apart
  int* most;      // (K) scratch, zeros before
  int8_t* c;      // (K)
  int64_t rows, K, v_stride;
  bool is_double;
};

cudaError_t launch(const ColumnExponents& p, cudaStream_t stream);
