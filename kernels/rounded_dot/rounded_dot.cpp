// y[i] = sum_k x[i,k] w[k] + b on a CPU, short chains in float, then double.
// Who owns what: a call owns rows [begin, end). It takes several rows at a time, so that a piece of w
//   is loaded once for all of them, and keeps vectors of partial sums a row.
// Moves: x once, 4 B K bytes; w in float, 4 K bytes, stays in L1 or L2.
// Widening each x to double takes longer than reading it from L3; here every 32nd partial sum is. Two
// kinds of rows are taken in double after all: those whose sum is so small beside its parts that the
// roundings show, and those that leave the range in which float products are safe. What a row gives
// does not depend on the rows beside it.
#include "rounded_dot.h"

#include <algorithm>
#include <cmath>

#include "dot_rows.h"

namespace {

constexpr double kSmall = 0x1p-60, kLarge = 0x1p60;
// Of n parts of random sign the sum is sqrt(n) times one part, and the roundings are 7e-8 of that: of
// a sum that is a 32nd of it, 2e-6.
constexpr double kLeast = 1.0 / 1024;  // squared

bool is_good(Dot row) {
  const double size = std::fabs(row.sum);
  return size >= kSmall && size <= kLarge && size * size >= kLeast * row.square;  // a NaN is not
}

// Rows that wait to be taken in double, together.
struct Waiting {
  const RoundedDot& p;
  const float* x[kRows];
  int64_t at[kRows];
  int count = 0;

  void add(int64_t i) {
    x[count] = p.x + i * p.x_stride, at[count++] = i;
    if (count == kRows) finish();
  }

  void finish() {
    Dot found[kRows];
    if (count == kRows)
      dot_rows<kRows>(p, nullptr, x, found);
    else
      for (int r = 0; r < count; ++r) dot_rows<1>(p, nullptr, x + r, found + r);
    for (int r = 0; r < count; ++r) p.y[at[r]] = static_cast<float>(found[r].sum + *p.b);
    count = 0;
  }
};

template <int Rows>
void write_rows(const RoundedDot& p, int64_t first, Waiting& waiting) {
  const float* x[Rows];
  for (int r = 0; r < Rows; ++r) x[r] = p.x + (first + r) * p.x_stride;
  Dot found[Rows];
  dot_rows<Rows>(p, p.rounded, x, found);
  for (int r = 0; r < Rows; ++r)
    if (is_good(found[r]))
      p.y[first + r] = static_cast<float>(found[r].sum + *p.b);
    else
      waiting.add(first + r);
}

}  // namespace

void launch(const RoundedDot& p, int64_t begin, int64_t end) {
  Waiting waiting{p};
  int64_t i = begin;
  for (; i + kRows <= end; i += kRows) write_rows<kRows>(p, i, waiting);
  for (; i < end; ++i) write_rows<1>(p, i, waiting);
  waiting.finish();
}
