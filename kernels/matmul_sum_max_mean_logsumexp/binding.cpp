// The sum chain as a torch op. The one file here that knows torch; every rung is built with it.
#include "problem.h"
#include "stable.h"

namespace {

// y (B, 1) <- the chain over x (B, K), features adjacent, rows at any stride; weight (N, K),
// bias (N); w_sum (K) and b_sum () in double. A rung reads weight and bias, or w_sum and b_sum.
void run(const wb::Tensor& x, const wb::Tensor& weight, const wb::Tensor& bias,
         const wb::Tensor& w_sum, const wb::Tensor& b_sum, wb::Tensor& y) {
  WB_CHECK(x.dim() == 2 && x.scalar_type() == wb::Float, "x: wants a float32 (B, K) tensor");
  const int64_t B = x.size(0), K = x.size(1);
  WB_CHECK(x.stride(1) == 1 || K <= 1 || B == 0, "x: features are ", x.stride(1),
           " elements apart; wants them adjacent: x.contiguous()");
  WB_CHECK(wb::has_shape(weight, {wb::any, K}) && weight.scalar_type() == wb::Float,
           "weight: wants a float32 (out_features, ", K, ") tensor");
  const int64_t N = weight.size(0);
  WB_CHECK(wb::has_shape(bias, {N}) && bias.scalar_type() == wb::Float, "bias: wants a float32 (",
           N, ") tensor");
#ifdef WB_READS_WEIGHT  // a rung that does not fold reads them through plain pointers
  wb::expect(weight, "weight", wb::Float, {N, K});
  wb::expect(bias, "bias", wb::Float, {N});
#endif
  wb::expect(w_sum, "w_sum", wb::Double, {K});
  wb::expect(b_sum, "b_sum", wb::Double, {});
  wb::expect(y, "y", wb::Float, {B, 1});
  for (const wb::Tensor* other :
       {&weight, &bias, &w_sum, &b_sum, static_cast<const wb::Tensor*>(&y)})
    wb::expect_same_device(x, "x", *other, "another argument");
  const SumChain p{x.const_data_ptr<float>(),
                   weight.const_data_ptr<float>(),
                   bias.const_data_ptr<float>(),
                   w_sum.const_data_ptr<double>(),
                   b_sum.const_data_ptr<double>(),
                   y.mutable_data_ptr<float>(),
                   B,
                   K,
                   N,
                   x.stride(0)};
  if (B == 0) return;
#ifdef WB_CUDA
  const wb::OnDevice on(x);
  wb::check(launch(p, on.stream), "sum chain");
#else
  constexpr int64_t kElementsPerTask =
      32768;  // below this a second thread costs more than it gives
  const int64_t grain = K < kElementsPerTask ? kElementsPerTask / (K > 0 ? K : 1) : 1;
  wb::parallel_for(0, B, grain, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
#endif
}

STABLE_TORCH_LIBRARY_FRAGMENT(WB_NAMESPACE, m) {
  m.def(
      "run(Tensor x, Tensor weight, Tensor bias, Tensor w_sum, Tensor b_sum, Tensor(a!) y) -> ()");
}

#ifdef WB_CUDA
STABLE_TORCH_LIBRARY_IMPL(WB_NAMESPACE, CUDA, m) { m.impl("run", TORCH_BOX(&run)); }
#else
STABLE_TORCH_LIBRARY_IMPL(WB_NAMESPACE, CPU, m) { m.impl("run", TORCH_BOX(&run)); }
#endif

}  // namespace
