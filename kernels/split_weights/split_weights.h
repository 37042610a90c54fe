// Weights, or what a fold makes of them, as two matrices of halves, with an exponent a row and a column:
//   V[r,k] 2^-c[k] = 2^e[r] (hi[r,k] + lo[r,k])
// V is W; or the differences of its pairs of rows; or the means of groups of its rows.
// c and e come from samples of V: each number is then split as soon as it is read, and W is read once.
// A number may exceed 2^c by 2^kBeyond, and the largest of a row ends below 2^(kTop + 1); where one
// exceeds that, or is not finite, everything is split again by exponents of all of V. hi and lo keep 22
// bits of what is 2^-12 of the sample's largest, and at least 2^-34 of that.
// Of a row with an infinity or NaN e is kNotFinite: the product then takes the row as it is.
// The layout of hi and lo: halves.cuh; zeros behind K.
#pragma once
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "halves.h"

enum Fold { kWhole = 0, kDifference = 1, kMean = 2 };

struct SplitWeights {
  const float* W;       // (rows group, K), rows `stride` apart
  int8_t* c;            // (width), 0 behind K
  int* most;            // (K + 1): exponents of the columns that c stands for; whether to split again
  int* e;               // (rows)
  half *hi, *lo;        // width columns, K rounded up to 64
  float* mean;          // (rows, K), of kMean: in float
  double* mean_exact;   // and in double
  double *partial, *s;  // (slices, K) and (K), of kDifference: the sums of W's columns
  const float* bias;    // (2 rows), of kDifference, and of it
  double *shift, *total;  // (rows), b[2r] - b[2r + 1], and (1), its sum
  int64_t rows, K, width, stride, group, slices;
  Fold fold;
};

cudaError_t launch(const SplitWeights& p, cudaStream_t stream);
