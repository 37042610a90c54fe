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
  wb::parallel_for(0, tasks_of(p), grain_of(p),
                   [&](int64_t begin, int64_t end) { launch(p, begin, end); });
#endif
}

WB_REGISTER("run(Tensor W, int pool, Tensor(a!) w, Tensor(b!) w_exact) -> ()", run)

}  // namespace
