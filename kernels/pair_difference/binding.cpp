// The differences of pairs of rows, and the column sum, as a torch op.
#include "huge_pages.h"
#include "pair_difference.h"
#include "stable.h"

namespace {

// D (M, K) <- W[2m] - W[2m+1], s (K) <- sums of the columns, of W (2 M, K); partial (slices, K) is
// scratch, on a GPU alone.
void run(const wb::Tensor& W, wb::Tensor& D, wb::Tensor& partial, wb::Tensor& s) {
  WB_CHECK(W.dim() == 2, "W: wants a (2 M, K) matrix");
  const int64_t N = W.size(0), K = W.size(1);
  WB_CHECK(N % 2 == 0, "W: got ", N, " rows; wants pairs of them");
  wb::expect(W, "W", wb::Float, {N, K});
  wb::expect(D, "D", wb::Float, {N / 2, K});
  wb::expect(partial, "partial", wb::Double, {wb::any, K});
  wb::expect(s, "s", wb::Double, {K});
  wb::expect_same_device(W, "W", D, "D");
  wb::expect_same_device(W, "W", partial, "partial");
  wb::expect_same_device(W, "W", s, "s");
  const PairDifference p{W.const_data_ptr<float>(),
                         D.mutable_data_ptr<float>(),
                         partial.mutable_data_ptr<double>(),
                         s.mutable_data_ptr<double>(),
                         N / 2,
                         K,
                         partial.size(0)};
  if (K == 0) return;
#ifdef WB_CUDA
  WB_CHECK(p.slices > 0, "partial: wants at least one slice");
  const wb::OnDevice on(W);
  wb::check(launch(p, on.stream), "pair difference");
#else
  wb::expect_huge_pages(p.D, D.numel() * sizeof(float));
  const int64_t strips = (K + kStrip - 1) / kStrip;
  wb::parallel_for(0, strips, 1, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
#endif
}

WB_REGISTER("run(Tensor W, Tensor(a!) D, Tensor(b!) partial, Tensor(c!) s) -> ()", run)

}  // namespace
