// The fold of the sum chain on a CPU, in double:
//     w_sum[k] = sum_n W[n,k],  b_sum = sum_n b[n]
// and, in float, w_sum rounded. `is_short`: whether float chains over it err no more than the original
// does, which rounds in each of its N outputs, whose errors average: over w_sum one errs by as much, if
// its elements are of the size that N random ones have, sqrt(N) times theirs. Where weights have one
// sign they are N times as large, and there only double will do.
#pragma once
#include <cstdint>

struct SumFold {
  const float *W, *bias;  // (N, K) contiguous, (N)
  double* sum;            // scratch (slices, K): of the rows of a slice,
  double* squares;        // (tasks): of the weights of a task
  double *w_sum, *b_sum;  // (K), ()
  float* rounded;         // (K)
  int64_t N, K, slices;
};

constexpr int64_t kColumns = 4096;  // of a task: 16 KB of each row, 32 KB of sums
constexpr int64_t kSlice = 64;      // rows of a slice, at least,
constexpr int64_t kSlices = 4;      // and slices, at most: a thread reads whole rows

inline int64_t tasks_of(const SumFold& p) { return p.slices * ((p.K + kColumns - 1) / kColumns); }

void add_rows(const SumFold& p, int64_t begin, int64_t end);  // tasks: a slice of some columns
bool finish(const SumFold& p);                                // is_short
