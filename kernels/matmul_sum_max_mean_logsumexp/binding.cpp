// The sum chain as a torch op. The one file here that knows torch; every rung is built with it, in
// one of two forms: "chain" reads weight and bias, "folded" reads w_sum and b_sum.
#include "problem.h"
#include "stable.h"

namespace {

void run_rows(const SumChain& p, const wb::Tensor& x) {
  if (p.B == 0) return;
#ifdef WB_CUDA
  const wb::OnDevice on(x);
  wb::check(launch(p, on.stream), "sum chain");
#else
  // Elements of a task: below this a second thread costs more than it gives.
  constexpr int64_t kTask = 32768;
  const int64_t grain = p.K < kTask ? kTask / (p.K > 0 ? p.K : 1) : 1;
  wb::parallel_for(0, p.B, grain, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
#endif
}

SumChain rows_of(const wb::Tensor& x, wb::Tensor& y) {
  wb::expect_rows(x, "x");
  wb::expect(y, "y", wb::Float, {x.size(0), 1});
  wb::expect_same_device(x, "x", y, "y");
  SumChain p{};
  p.x = x.const_data_ptr<float>();
  p.y = y.mutable_data_ptr<float>();
  p.B = x.size(0);
  p.K = x.size(1);
  p.x_stride = x.stride(0);
  return p;
}

#ifdef WB_CHAIN
// y (B, 1) <- the chain over x (B, K), rows at any stride; weight (N, K), bias (N).
void run(const wb::Tensor& x, const wb::Tensor& weight, const wb::Tensor& bias, wb::Tensor& y) {
  SumChain p = rows_of(x, y);
  wb::expect(weight, "weight", wb::Float, {wb::any, p.K});
  p.N = weight.size(0);
  wb::expect(bias, "bias", wb::Float, {p.N});
  wb::expect_same_device(x, "x", weight, "weight");
  wb::expect_same_device(x, "x", bias, "bias");
  p.W = weight.const_data_ptr<float>();
  p.b = bias.const_data_ptr<float>();
  run_rows(p, x);
}

WB_REGISTER("run(Tensor x, Tensor weight, Tensor bias, Tensor(a!) y) -> ()", run)
#else
// y (B, 1) <- x (B, K) . w_sum (K) + b_sum (), rows of x at any stride, the sums in double.
void run(const wb::Tensor& x, const wb::Tensor& w_sum, const wb::Tensor& b_sum, wb::Tensor& y) {
  SumChain p = rows_of(x, y);
  wb::expect(w_sum, "w_sum", wb::Double, {p.K});
  wb::expect(b_sum, "b_sum", wb::Double, {});
  wb::expect_aligned(w_sum, "w_sum");
  wb::expect_same_device(x, "x", w_sum, "w_sum");
  wb::expect_same_device(x, "x", b_sum, "b_sum");
  p.w_sum = w_sum.const_data_ptr<double>();
  p.b_sum = b_sum.const_data_ptr<double>();
  run_rows(p, x);
}

WB_REGISTER("run(Tensor x, Tensor w_sum, Tensor b_sum, Tensor(a!) y) -> ()", run)
#endif

}  // namespace
