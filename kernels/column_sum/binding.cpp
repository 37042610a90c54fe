// The column sum as a torch op.
#include "column_sum.h"
#include "stable.h"

namespace {

// s (K) <- sums of the columns of W (N, K), float32 to double; partial (slices, K) is scratch.
void run(const wb::Tensor& W, wb::Tensor& partial, wb::Tensor& s) {
  WB_CHECK(W.dim() == 2, "W: wants a (N, K) matrix");
  const int64_t N = W.size(0), K = W.size(1);
  wb::expect(W, "W", wb::Float, {N, K});
  wb::expect(partial, "partial", wb::Double, {wb::any, K});
  wb::expect(s, "s", wb::Double, {K});
  wb::expect_same_device(W, "W", s, "s");
  wb::expect_same_device(W, "W", partial, "partial");
  const ColumnSum p{W.const_data_ptr<float>(),
                    partial.mutable_data_ptr<double>(),
                    s.mutable_data_ptr<double>(),
                    N,
                    K,
                    partial.size(0)};
  if (K == 0) return;
#ifdef WB_CUDA
  WB_CHECK(p.slices > 0, "partial: wants at least one slice");
  const wb::OnDevice on(W);
  wb::check(launch(p, on.stream), "column sum");
#else
  const int64_t strips = (K + kStrip - 1) / kStrip;
  wb::parallel_for(0, strips, 1, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
#endif
}

WB_REGISTER("run(Tensor W, Tensor(a!) partial, Tensor(b!) s) -> ()", run)

}  // namespace
