// The chain around its matrix product as torch ops, in forms: "tail" takes z whole; "blocks" by
// blocks of features (CPU); "tiles" whole, with room for the parts of a row (CUDA). Train mode adds
// the ops that take the statistics of the batch.
#include "problem.h"
#include "stable.h"

namespace {

using wb::Tensor;

constexpr int64_t kTask = 8192;  // elements of a CPU task: below, a second thread costs more

void run_rows(const Tail& p, const Tensor& y) {
  if (p.B == 0 || p.N == 0) return;
#ifdef WB_CUDA
  const wb::OnDevice on(y);
  wb::check(launch(p, on.stream), "batchnorm scale softmax");
#else
  const int64_t grain = p.N < kTask ? kTask / p.N : 1;
  wb::parallel_for(0, p.B, grain, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
#endif
}

const float* vector_of(const Tensor& v, const char* name, int64_t N, const Tensor& beside,
                       const char* its_name) {
  wb::expect(v, name, wb::Float, {N});
  wb::expect_same_device(beside, its_name, v, name);
  return v.const_data_ptr<float>();
}

Tail tail_of(Tensor& y, const Tensor& shift, const Tensor& a, const Tensor& d) {
  wb::expect(y, "y", wb::Float, {wb::any, wb::any});
  Tail p{};
  p.B = y.size(0);
  p.N = y.size(1);
  p.y = y.mutable_data_ptr<float>();
  p.shift = vector_of(shift, "shift", p.N, y, "y");
  p.a = vector_of(a, "a", p.N, y, "y");
  p.d = vector_of(d, "d", p.N, y, "y");
  return p;
}

#if defined(WB_BLOCKS)
// y[:, first:last] holds the product; after the block that ends at N all of y is the softmax.
void run(Tensor& y, const Tensor& shift, const Tensor& a, const Tensor& d, Tensor& partial,
         int64_t first, int64_t last) {
  Tail p = tail_of(y, shift, a, d);
  wb::expect(partial, "partial", wb::Double, {p.B, 2});
  WB_CHECK(0 <= first && first < last && last <= p.N, "first, last: got ", first, " and ", last,
           "; wants a block of the ", p.N, " features");
  p.partial = partial.mutable_data_ptr<double>();
  p.first = first;
  p.last = last;
  run_rows(p, y);
}

WB_REGISTER(
    "run(Tensor(a!) y, Tensor shift, Tensor a, Tensor d, Tensor(b!) partial, int first, int last)"
    " -> ()",
    run)
#elif defined(WB_TILES)
// y (B, N) <- the softmax over the map of y; partial (B, tiles, 2) is scratch.
void run(Tensor& y, const Tensor& shift, const Tensor& a, const Tensor& d, Tensor& partial) {
  Tail p = tail_of(y, shift, a, d);
  p.tiles = (p.N + kTile - 1) / kTile;
  wb::expect(partial, "partial", wb::Float, {p.B, p.tiles, 2});
  wb::expect_same_device(y, "y", partial, "partial");
  p.partial = partial.mutable_data_ptr<float>();
  run_rows(p, y);
}

WB_REGISTER("run(Tensor(a!) y, Tensor shift, Tensor a, Tensor d, Tensor(b!) partial) -> ()", run)
#else
// y (B, N) <- the softmax over the map of y.
void run(Tensor& y, const Tensor& shift, const Tensor& a, const Tensor& d) {
  run_rows(tail_of(y, shift, a, d), y);
}

WB_REGISTER("run(Tensor(a!) y, Tensor shift, Tensor a, Tensor d) -> ()", run)
#endif

#define WB_REGISTER_ALSO(name, schema)                                    \
  STABLE_TORCH_LIBRARY_FRAGMENT(WB_NAMESPACE, m) { m.def(#name schema); } \
  STABLE_TORCH_LIBRARY_IMPL(WB_NAMESPACE, WB_DEVICE, m) { m.impl(#name, TORCH_BOX(&name)); }

#if defined(WB_TILES) && defined(WB_CUDA)
// map (3, N) <- shift, a, d of the running statistics; scale for all features or one each.
void fold(const Tensor& bias, const Tensor& gamma, const Tensor& beta, const Tensor& mean,
          const Tensor& var, const Tensor& scale, Tensor& map, double eps) {
  wb::expect(map, "map", wb::Float, {3, wb::any});
  Fold p{};
  p.N = map.size(1);
  p.bias = vector_of(bias, "bias", p.N, map, "map");
  p.gamma = vector_of(gamma, "gamma", p.N, map, "map");
  p.beta = vector_of(beta, "beta", p.N, map, "map");
  p.mean = vector_of(mean, "mean", p.N, map, "map");
  p.var = vector_of(var, "var", p.N, map, "map");
  p.scale_stride = scale.numel() == 1 ? 0 : 1;
  p.scale = vector_of(scale, "scale", p.scale_stride ? p.N : 1, map, "map");
  p.shift = map.mutable_data_ptr<float>();
  p.a = p.shift + p.N;
  p.d = p.a + p.N;
  p.eps = eps;
  if (p.N == 0) return;
  const wb::OnDevice on(map);
  wb::check(launch(p, on.stream), "map of the running statistics");
}

WB_REGISTER_ALSO(fold,
                 "(Tensor bias, Tensor gamma, Tensor beta, Tensor mean, Tensor var, Tensor scale,"
                 " Tensor(a!) map, float eps) -> ()")
#endif

#ifdef WB_TRAIN
Statistics statistics_of(const Tensor& z, const Tensor& bias, const Tensor& gamma,
                         const Tensor& beta, const Tensor& scale, Tensor& map, Tensor& var,
                         double eps) {
  wb::expect(z, "z", wb::Float, {wb::any, wb::any});
  Statistics p{};
  p.B = z.size(0);
  p.N = z.size(1);
  WB_CHECK(p.B > 1, "z: got ", p.B, " rows of the batch; wants 2 or more");
  p.z = z.const_data_ptr<float>();
  p.bias = vector_of(bias, "bias", p.N, z, "z");
  p.gamma = vector_of(gamma, "gamma", p.N, z, "z");
  p.beta = vector_of(beta, "beta", p.N, z, "z");
  p.scale_stride = scale.numel() == 1 ? 0 : 1;
  p.scale = vector_of(scale, "scale", p.scale_stride ? p.N : 1, z, "z");
  wb::expect(map, "map", wb::Float, {3, p.N});
  wb::expect_same_device(z, "z", map, "map");
  p.shift = map.mutable_data_ptr<float>();
  p.a = p.shift + p.N;
  p.d = p.a + p.N;
  vector_of(var, "var", p.N, z, "z");
  p.var = var.mutable_data_ptr<float>();
  p.eps = eps;
  return p;
}

#ifdef WB_CUDA
// map (3, N) <- shift, a, d of the batch; var (N) <- its unbiased variance; partial (slices, 2, N)
// is scratch.
void statistics(const Tensor& z, const Tensor& bias, const Tensor& gamma, const Tensor& beta,
                const Tensor& scale, Tensor& map, Tensor& var, Tensor& partial, double eps) {
  Statistics p = statistics_of(z, bias, gamma, beta, scale, map, var, eps);
  wb::expect(partial, "partial", wb::Double, {wb::any, 2, p.N});
  wb::expect_same_device(z, "z", partial, "partial");
  p.slices = partial.size(0);
  WB_CHECK(p.slices > 0, "partial: got no slice; wants at least one");
  p.partial = partial.mutable_data_ptr<double>();
  if (p.N == 0) return;
  const wb::OnDevice on(z);
  wb::check(launch(p, on.stream), "statistics of the batch");
}

WB_REGISTER_ALSO(statistics,
                 "(Tensor z, Tensor bias, Tensor gamma, Tensor beta, Tensor scale, Tensor(a!) map,"
                 " Tensor(b!) var, Tensor(c!) partial, float eps) -> ()")

// mean (N) <- weight (N, K) total (K) / batch + bias: the mean of the Linear's output.
void mean(const Tensor& weight, const Tensor& bias, const Tensor& total, Tensor& mean,
          int64_t batch) {
  wb::expect_rows(weight, "weight");
  Mean p{};
  p.N = weight.size(0);
  p.K = weight.size(1);
  p.B = batch;
  p.W = weight.const_data_ptr<float>();
  p.W_stride = weight.stride(0);
  p.bias = vector_of(bias, "bias", p.N, weight, "weight");
  wb::expect(total, "total", wb::Double, {p.K});
  wb::expect_aligned(total, "total");
  wb::expect_same_device(weight, "weight", total, "total");
  p.total = total.const_data_ptr<double>();
  vector_of(mean, "mean", p.N, weight, "weight");
  p.mean = mean.mutable_data_ptr<float>();
  if (p.N == 0) return;
  const wb::OnDevice on(weight);
  wb::check(launch(p, on.stream), "mean of the batch");
}

WB_REGISTER_ALSO(mean,
                 "(Tensor weight, Tensor bias, Tensor total, Tensor(a!) mean, int batch) -> ()")

// total (K) <- the sum of x (B, K) over the batch; c (K) <- the median of the means of its groups, at
// most kGroups, of B / groups rows each; partial (groups kCentreSlices + 1, K) is scratch.
void centre(const Tensor& x, Tensor& partial, Tensor& total, Tensor& c) {
  wb::expect_rows(x, "x");
  Centre p{};
  p.B = x.size(0);
  p.K = x.size(1);
  p.x_stride = x.stride(0);
  WB_CHECK(p.B > 0, "x: got no sample; wants at least one");
  p.groups = static_cast<int>(p.B < kGroups ? p.B : kGroups);
  p.rows = p.B / p.groups;
  wb::expect(partial, "partial", wb::Double, {p.groups * kCentreSlices + 1, p.K});
  wb::expect(total, "total", wb::Double, {p.K});
  wb::expect_same_device(x, "x", partial, "partial");
  wb::expect_same_device(x, "x", total, "total");
  vector_of(c, "c", p.K, x, "x");
  p.x = x.const_data_ptr<float>();
  p.partial = partial.mutable_data_ptr<double>();
  p.total = total.mutable_data_ptr<double>();
  p.c = c.mutable_data_ptr<float>();
  if (p.K == 0) return;
  const wb::OnDevice on(x);
  wb::check(launch(p, on.stream), "centre of the batch");
}

WB_REGISTER_ALSO(centre, "(Tensor x, Tensor(a!) partial, Tensor(b!) total, Tensor(c!) c) -> ()")
#else
// Of features first .. last: map (3, N) <- shift, a, d of the batch; var (N) <- its unbiased variance.
void statistics(const Tensor& z, const Tensor& bias, const Tensor& gamma, const Tensor& beta,
                const Tensor& scale, Tensor& map, Tensor& var, int64_t first, int64_t last,
                double eps) {
  Statistics p = statistics_of(z, bias, gamma, beta, scale, map, var, eps);
  WB_CHECK(0 <= first && first < last && last <= p.N, "first, last: got ", first, " and ", last,
           "; wants a block of the ", p.N, " features");
  p.first = first;
  p.last = last;
  const int64_t strips = (last - first + kStrip - 1) / kStrip;
  const int64_t grain = p.B * kStrip < kTask ? kTask / (p.B * kStrip) : 1;
  wb::parallel_for(0, strips, grain, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
}

WB_REGISTER_ALSO(statistics,
                 "(Tensor z, Tensor bias, Tensor gamma, Tensor beta, Tensor scale, Tensor(a!) map,"
                 " Tensor(b!) var, int first, int last, float eps) -> ()")
#endif
#endif

}  // namespace
