// The mean of groups of rows as a torch op.
#include "group_mean.h"
#include "huge_pages.h"
#include "stable.h"

namespace {

// w, w_exact (groups, K) <- means of `pool` neighbouring rows of W (N, K); N / pool rounds down. An
// empty w_exact is not written.
void run(const wb::Tensor& W, int64_t pool, wb::Tensor& w, wb::Tensor& w_exact) {
  WB_CHECK(W.dim() == 2, "W: wants a (N, K) matrix");
  const int64_t N = W.size(0), K = W.size(1);
  WB_CHECK(pool > 0, "pool: got ", pool, "; wants at least 1");
  wb::expect(W, "W", wb::Float, {N, K});
  wb::expect(w, "w", wb::Float, {N / pool, K});
  const bool both = w_exact.numel() > 0;
  if (both) wb::expect(w_exact, "w_exact", wb::Double, {N / pool, K});
  wb::expect_same_device(W, "W", w, "w");
  wb::expect_same_device(W, "W", w_exact, "w_exact");
  const GroupMean p{W.const_data_ptr<float>(),
                    w.mutable_data_ptr<float>(),
                    both ? w_exact.mutable_data_ptr<double>() : nullptr,
                    K,
                    N / pool,
                    pool};
  if (K == 0 || p.groups == 0) return;
#ifdef WB_CUDA
  const wb::OnDevice on(W);
  wb::check(launch(p, on.stream), "group mean");
#else
  wb::expect_huge_pages(p.w, w.numel() * sizeof(float));
  if (both) wb::expect_huge_pages(p.w_exact, w_exact.numel() * sizeof(double));
  const int64_t tasks = p.groups * ((K + kStrip - 1) / kStrip);
  // Elements of W below which a second thread costs more than it gives.
  constexpr int64_t kLeast = 32768;
  const int64_t of_a_task = pool * (K < kStrip ? K : kStrip);
  const int64_t grain = of_a_task < kLeast ? kLeast / of_a_task : 1;
  wb::parallel_for(0, tasks, grain, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
#endif
}

WB_REGISTER("run(Tensor W, int pool, Tensor(a!) w, Tensor(b!) w_exact) -> ()", run)

}  // namespace
