// The fold of means as a torch op: one, for torch's small ones take as long as reading the weights.
#include <tuple>

#include "fresh_tensor.h"
#include "kept_memory.h"
#include "mean_fold.h"
#include "stable.h"

namespace {

using wb::Tensor;

// W (N, K), bias (N) -> w (groups, K), b (groups) in float, and both in double; N / pool rounds down.
std::tuple<Tensor, Tensor, Tensor, Tensor> run(const Tensor& W, const Tensor& bias, int64_t pool) {
  wb::expect(W, "W", wb::Float, {wb::any, wb::any});
  WB_CHECK(pool > 0, "pool: got ", pool, "; wants at least 1");
  MeanFold p{};
  p.K = W.size(1), p.groups = W.size(0) / pool, p.pool = pool;
  wb::expect(bias, "bias", wb::Float, {W.size(0)});
  Tensor w = wb::kept<float>(p.groups, p.K),
         b = wb::fresh({p.groups}, aoti_torch_dtype_float32()),
         w_exact = wb::kept<double>(p.groups, p.K),
         b_exact = wb::fresh({p.groups}, aoti_torch_dtype_float64());
  p.W = W.const_data_ptr<float>(), p.bias = bias.const_data_ptr<float>();
  p.w = w.mutable_data_ptr<float>(), p.b = b.mutable_data_ptr<float>();
  p.w_exact = w_exact.mutable_data_ptr<double>(), p.b_exact = b_exact.mutable_data_ptr<double>();
  if (p.groups == 0) return {w, b, w_exact, b_exact};
  if (p.K > 0)
    wb::parallel_for(0, tasks_of(p), grain_of(p),
                     [&](int64_t begin, int64_t end) { take_weights(p, begin, end); });
  take_bias(p);
  return {w, b, w_exact, b_exact};
}

WB_REGISTER("run(Tensor W, Tensor bias, int pool) -> (Tensor, Tensor, Tensor, Tensor)", run)

}  // namespace
