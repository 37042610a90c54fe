// The chain on a batch as a torch op, and one that moves running statistics.
#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>

#include "fresh_tensor.h"
#include "stable.h"
#include "whole_batch.h"

namespace {

using wb::Tensor;

constexpr int64_t kTask = 16384;  // elements or multiplications: below, a second thread costs more

const float* vector_of(const Tensor& v, const char* name, int64_t count) {
  wb::expect(v, name, wb::Float, {count});
  return v.const_data_ptr<float>();
}

template <class F>
void in_tasks(int64_t count, int64_t each, const WholeBatch& p, int64_t work, const F& step) {
  const int64_t tasks = (count + each - 1) / each;
  const int64_t grain = std::max<int64_t>(1, kTask / std::max<int64_t>(1, work));
  wb::parallel_for(0, tasks, grain, [&](int64_t begin, int64_t end) { step(p, begin, end); });
}

// x (B, K), W (N, K) -> y (B, N), mean (N), var (N), c (K); z (B, N) <- the product of (x - c) / 2.
std::tuple<Tensor, Tensor, Tensor, Tensor> run(const Tensor& x, const Tensor& W, const Tensor& bias,
                                               const Tensor& gamma, const Tensor& beta,
                                               const Tensor& scale, double eps,
                                               const std::optional<Tensor>& z) {
  wb::expect_rows(x, "x");
  wb::expect_rows(W, "W");
  WholeBatch p{};
  p.B = x.size(0), p.K = x.size(1), p.N = W.size(0);
  WB_CHECK(p.B > 1, "x: got ", p.B, " rows of the batch; wants 2 or more");
  WB_CHECK(W.size(1) == p.K, "W: has ", W.size(1), " features, wants ", p.K, " as x");
  p.x = x.const_data_ptr<float>(), p.x_stride = x.stride(0);
  p.W = W.const_data_ptr<float>(), p.W_stride = W.stride(0);
  p.bias = vector_of(bias, "bias", p.N);
  p.gamma = vector_of(gamma, "gamma", p.N);
  p.beta = vector_of(beta, "beta", p.N);
  p.scale_stride = scale.numel() == 1 ? 0 : 1;
  p.scale = vector_of(scale, "scale", p.scale_stride ? p.N : 1);
  p.eps = eps;
  if (z) wb::expect(*z, "z", wb::Float, {p.B, p.N});
  const auto made = [](std::initializer_list<int64_t> shape) {
    return wb::fresh(shape, aoti_torch_dtype_float32());
  };
  Tensor y = made({p.B, p.N}), mean = made({p.N}), var = made({p.N}), c = made({p.K});
  p.y = y.mutable_data_ptr<float>();
  p.z = z ? z->mutable_data_ptr<float>() : p.y;
  p.mean = mean.mutable_data_ptr<float>(), p.var = var.mutable_data_ptr<float>();
  p.c = c.mutable_data_ptr<float>();
  const std::unique_ptr<double[]> mean_x(new double[p.K]);
  const std::unique_ptr<float[]> map(new float[3 * p.N]);
  const std::unique_ptr<float[]> half(new float[is_short(p.K) ? p.B * p.K : 0]);
  p.mean_x = mean_x.get(), p.half = half.get();
  p.shift = map.get(), p.a = p.shift + p.N, p.d = p.a + p.N;
  in_tasks(p.K, kColumns, p, p.B * kColumns, take_centre);
  in_tasks(p.N, kOutputs, p, p.B * p.K * kOutputs, take_features);
  in_tasks(p.B, 1, p, p.N, take_rows);
  return {y, mean, var, c};
}

WB_REGISTER(
    "run(Tensor x, Tensor W, Tensor bias, Tensor gamma, Tensor beta, Tensor scale, float eps,"
    " Tensor(a!)? z) -> (Tensor, Tensor, Tensor, Tensor)",
    run)

void expect_running(const Tensor& running, const Tensor& found, const char* name) {
  wb::expect(found, name, wb::Float, {wb::any});
  WB_CHECK(running.dim() == 1 && running.scalar_type() == wb::Float && running.is_cpu() &&
               running.size(0) == found.size(0),
           "running ", name, ": wants ", found.size(0), " float32 numbers on the CPU");
}

// What a running statistic (N) becomes, in double and rounded once; at any stride.
void move(Tensor& running, const Tensor& found, double momentum) {
  float* to = running.mutable_data_ptr<float>();
  const float* from = found.const_data_ptr<float>();
  const int64_t stride = running.stride(0);
  for (int64_t n = 0; n < found.size(0); ++n)
    to[n * stride] = static_cast<float>((1 - momentum) * to[n * stride] + momentum * from[n]);
}

// One batch more, with these statistics.
void track(Tensor& running_mean, Tensor& running_var, Tensor& batches, const Tensor& mean,
           const Tensor& var, double momentum) {
  wb::expect(batches, "batches", torch::headeronly::ScalarType::Long, {});
  expect_running(running_mean, mean, "mean");
  expect_running(running_var, var, "var");
  move(running_mean, mean, momentum);
  move(running_var, var, momentum);
  ++*batches.mutable_data_ptr<int64_t>();
}

STABLE_TORCH_LIBRARY_FRAGMENT(WB_NAMESPACE, m) {
  m.def(
      "track(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor(c!) batches, Tensor mean,"
      " Tensor var, float momentum) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(WB_NAMESPACE, WB_DEVICE, m) { m.impl("track", TORCH_BOX(&track)); }

}  // namespace
