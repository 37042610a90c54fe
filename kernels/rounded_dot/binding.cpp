// Rows times a vector, in short chains, as a torch op.
#include "rounded_dot.h"
#include "stable.h"

namespace {

// y (B, 1) <- x (B, K) . w (K) + b (), rows of x at any stride; rounded (K): w in float.
void run(const wb::Tensor& x, const wb::Tensor& w, const wb::Tensor& rounded, const wb::Tensor& b,
         wb::Tensor& y) {
  wb::expect_rows(x, "x");
  const int64_t B = x.size(0), K = x.size(1);
  wb::expect(w, "w", wb::Double, {K});
  wb::expect(rounded, "rounded", wb::Float, {K});
  wb::expect(b, "b", wb::Double, {});
  wb::expect(y, "y", wb::Float, {B, 1});
  const RoundedDot p{x.const_data_ptr<float>(),
                     w.const_data_ptr<double>(),
                     rounded.const_data_ptr<float>(),
                     b.const_data_ptr<double>(),
                     y.mutable_data_ptr<float>(),
                     B,
                     K,
                     x.stride(0)};
  // Elements of a task: below this a second thread costs more than it gives.
  constexpr int64_t kTask = 32768;
  const int64_t grain = K < kTask ? kTask / (K > 0 ? K : 1) : 1;
  wb::parallel_for(0, B, grain, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
}

WB_REGISTER("run(Tensor x, Tensor w, Tensor rounded, Tensor b, Tensor(a!) y) -> ()", run)

}  // namespace
