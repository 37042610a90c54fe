// The fold of the sum chain as a torch op.
#include <algorithm>
#include <memory>
#include <tuple>

#include "fresh_tensor.h"
#include "stable.h"
#include "sum_fold.h"

namespace {

using wb::Tensor;

// W (N, K), bias (N) -> w_sum (K) and b_sum () in float64, w_sum in float32, is_short.
std::tuple<Tensor, Tensor, Tensor, bool> run(const Tensor& W, const Tensor& bias) {
  wb::expect(W, "W", wb::Float, {wb::any, wb::any});
  SumFold p{};
  p.N = W.size(0), p.K = W.size(1);
  wb::expect(bias, "bias", wb::Float, {p.N});
  Tensor w_sum = wb::fresh({p.K}, aoti_torch_dtype_float64()),
         rounded = wb::fresh({p.K}, aoti_torch_dtype_float32()),
         b_sum = wb::fresh({}, aoti_torch_dtype_float64());
  p.W = W.const_data_ptr<float>(), p.bias = bias.const_data_ptr<float>();
  p.w_sum = w_sum.mutable_data_ptr<double>(), p.b_sum = b_sum.mutable_data_ptr<double>();
  p.rounded = rounded.mutable_data_ptr<float>();
  p.slices = std::clamp<int64_t>(p.N / kSlice, 1, kSlices);
  const int64_t tasks = tasks_of(p);
  const std::unique_ptr<double[]> scratch(new double[p.slices * p.K + tasks]);
  p.sum = scratch.get(), p.squares = p.sum + p.slices * p.K;
  constexpr int64_t kTask = 65536;  // elements: below them a second thread costs more
  const int64_t each = std::max<int64_t>(1, p.N * p.K / std::max<int64_t>(tasks, 1));
  wb::parallel_for(0, tasks, std::max<int64_t>(1, kTask / each),
                   [&](int64_t begin, int64_t end) { add_rows(p, begin, end); });
  const bool is_short = finish(p);
  return {w_sum, b_sum, rounded, is_short};
}

WB_REGISTER("run(Tensor W, Tensor bias) -> (Tensor, Tensor, Tensor, bool)", run)

}  // namespace
