// Rung 2 on a CPU: the product by torch, whole; then a row at a time for what is left.
//   y[i] = scale sum_w max_j z[i, w pool + j],   z = x W^T + b from memory
// Who owns what: a call owns rows [begin, end).
// Moves: z once, 4 B N bytes, after the product has written it.
// Against rung 1: W is read once for the whole batch, by a product that uses the vector units.
#include "problem.h"
#include "windows.h"

void launch(const Pooled& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i)
    p.y[i] = scaled(sum_of_maxima(p.z + i * p.N, p.N, p.pool), p.scale);
}
