// The fold of pairs as a torch op: one, for torch's small ones take as long as reading the weights.
#include <tuple>

#include "fresh_tensor.h"
#include "kept_memory.h"
#include "pair_fold.h"
#include "stable.h"

namespace {

using wb::Tensor;

// W (N, K), bias (N) -> D (M, K) in float, shifts (M), w_sum (K) and b_sum () in double, M = N / 2: a
// feature that is left over is not read.
std::tuple<Tensor, Tensor, Tensor, Tensor> run(const Tensor& W, const Tensor& bias) {
  wb::expect(W, "W", wb::Float, {wb::any, wb::any});
  PairFold p{};
  p.M = W.size(0) / 2, p.K = W.size(1);
  wb::expect(bias, "bias", wb::Float, {W.size(0)});
  Tensor D = wb::kept<float>(p.M, p.K),
         shifts = wb::fresh({p.M}, aoti_torch_dtype_float64()),
         w_sum = wb::fresh({p.K}, aoti_torch_dtype_float64()),
         b_sum = wb::fresh({}, aoti_torch_dtype_float64());
  p.W = W.const_data_ptr<float>(), p.bias = bias.const_data_ptr<float>();
  p.D = D.mutable_data_ptr<float>(), p.shifts = shifts.mutable_data_ptr<double>();
  p.w_sum = w_sum.mutable_data_ptr<double>(), p.b_sum = b_sum.mutable_data_ptr<double>();
  wb::parallel_for(0, tasks_of(p), 1,
                   [&](int64_t begin, int64_t end) { take_weights(p, begin, end); });
  take_bias(p);
  return {D, shifts, w_sum, b_sum};
}

WB_REGISTER("run(Tensor W, Tensor bias) -> (Tensor, Tensor, Tensor, Tensor)", run)

}  // namespace
