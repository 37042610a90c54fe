// The differences of pairs of rows, and the column sum, as a torch op. On a CPU alone.
#include "huge_pages.h"
#include "pair_difference.h"
#include "stable.h"

namespace {

// D (M, K) <- W[2m] - W[2m+1], s (K) <- sums of the columns, of W (2 M, K).
void run(const wb::Tensor& W, wb::Tensor& D, wb::Tensor& s) {
  WB_CHECK(W.dim() == 2, "W: wants a (2 M, K) matrix");
  const int64_t N = W.size(0), K = W.size(1);
  WB_CHECK(N % 2 == 0, "W: got ", N, " rows; wants pairs of them");
  wb::expect(W, "W", wb::Float, {N, K});
  wb::expect(D, "D", wb::Float, {N / 2, K});
  wb::expect(s, "s", wb::Double, {K});
  const PairDifference p{W.const_data_ptr<float>(), D.mutable_data_ptr<float>(),
                         s.mutable_data_ptr<double>(), N / 2, K};
  if (K == 0) return;
  wb::expect_huge_pages(p.D, D.numel() * sizeof(float));
  const int64_t strips = (K + kStrip - 1) / kStrip;
  wb::parallel_for(0, strips, 1, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
}

WB_REGISTER("run(Tensor W, Tensor(a!) D, Tensor(b!) s) -> ()", run)

}  // namespace
