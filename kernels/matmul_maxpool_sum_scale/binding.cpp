// The maxpool chain as a torch op. The one file here that knows torch; every rung is built with it,
// in one of four forms: "chain" takes the weights as they are, "tail" the output of the product,
// "blocks" a part of it (on a CPU), "half" the product with the differences of paired weights.
#include "problem.h"
#include "stable.h"

namespace {

void run_rows(const Pooled& p, const wb::Tensor& device, int64_t elements_a_row) {
  if (p.B == 0) return;
#ifdef WB_CUDA
  const wb::OnDevice on(device);
  wb::check(launch(p, on.stream), "maxpool chain");
#else
  // Elements of a task: below this a second thread costs more than it gives.
  constexpr int64_t kTask = 32768;
  const int64_t a_row = elements_a_row > 0 ? elements_a_row : 1;
  const int64_t grain = a_row < kTask ? kTask / a_row : 1;
  wb::parallel_for(0, p.B, grain, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
#endif
}

void expect_pool(int64_t pool, int64_t least, int64_t most) {
  WB_CHECK(pool >= least && pool <= most, "pool: got ", pool, "; wants ", least, " to ", most);
}

#if defined(WB_CHAIN)
// y (B) <- the chain over x (B, K), rows at any stride; weight (N, K), bias (N).
void run(const wb::Tensor& x, const wb::Tensor& weight, const wb::Tensor& bias, int64_t pool,
         double scale, wb::Tensor& y) {
  wb::expect_rows(x, "x");
  wb::expect(weight, "weight", wb::Float, {wb::any, x.size(1)});
  wb::expect(bias, "bias", wb::Float, {weight.size(0)});
  wb::expect(y, "y", wb::Float, {x.size(0)});
  expect_pool(pool, 1, weight.size(0));
  wb::expect_same_device(x, "x", weight, "weight");
  wb::expect_same_device(x, "x", bias, "bias");
  wb::expect_same_device(x, "x", y, "y");
  const Pooled p{x.const_data_ptr<float>(),
                 weight.const_data_ptr<float>(),
                 bias.const_data_ptr<float>(),
                 y.mutable_data_ptr<float>(),
                 x.size(0),
                 x.size(1),
                 weight.size(0),
                 pool,
                 x.stride(0),
                 scale};
  run_rows(p, x, p.K * p.N);
}

WB_REGISTER("run(Tensor x, Tensor weight, Tensor bias, int pool, float scale, Tensor(a!) y) -> ()",
            run)
#elif defined(WB_TAIL) && defined(WB_BIAS)
// y (B) <- the sums of maxima of z (B, N) + bias (N).
void run(const wb::Tensor& z, const wb::Tensor& bias, int64_t pool, double scale, wb::Tensor& y) {
  wb::expect(z, "z", wb::Float, {wb::any, wb::any});
  wb::expect(bias, "bias", wb::Float, {z.size(1)});
  wb::expect(y, "y", wb::Float, {z.size(0)});
  expect_pool(pool, 1, z.size(1));
  wb::expect_same_device(z, "z", bias, "bias");
  wb::expect_same_device(z, "z", y, "y");
  const Pooled p{z.const_data_ptr<float>(), bias.const_data_ptr<float>(),
                 y.mutable_data_ptr<float>(), z.size(0), z.size(1), pool, scale};
  run_rows(p, z, p.N);
}

WB_REGISTER("run(Tensor z, Tensor bias, int pool, float scale, Tensor(a!) y) -> ()", run)
#elif defined(WB_TAIL)
// y (B) <- the sums of maxima of z (B, N).
void run(const wb::Tensor& z, int64_t pool, double scale, wb::Tensor& y) {
  wb::expect(z, "z", wb::Float, {wb::any, wb::any});
  wb::expect(y, "y", wb::Float, {z.size(0)});
  expect_pool(pool, 1, z.size(1));
  wb::expect_same_device(z, "z", y, "y");
  const Pooled p{
      z.const_data_ptr<float>(), y.mutable_data_ptr<float>(), z.size(0), z.size(1), pool, scale};
  run_rows(p, z, p.N);
}

WB_REGISTER("run(Tensor z, int pool, float scale, Tensor(a!) y) -> ()", run)
#elif defined(WB_BLOCKS)
// sums (B, 3) += x (B, K) . w_sum (K); the sums over the columns of z (B, N), with a pool those of
// its windows' maxima, without (0) those of |z + c|, c (N); and of |z|. Rows at any stride.
void run(const wb::Tensor& x, const wb::Tensor& w_sum, const wb::Tensor& z, const wb::Tensor& c,
         int64_t pool, wb::Tensor& sums) {
  wb::expect_rows(x, "x");
  wb::expect_rows(z, "z");
  WB_CHECK(z.size(0) == x.size(0), "z: got ", z.size(0), " rows; wants ", x.size(0), ", as x has");
  wb::expect(w_sum, "w_sum", wb::Double, {x.size(1)});
  wb::expect(c, "c", wb::Double, {pool > 0 ? 0 : z.size(1)});
  wb::expect(sums, "sums", wb::Double, {x.size(0), 3});
  expect_pool(pool, 0, z.size(1));
  const Pooled p{x.const_data_ptr<float>(),
                 w_sum.const_data_ptr<double>(),
                 z.const_data_ptr<float>(),
                 c.const_data_ptr<double>(),
                 sums.mutable_data_ptr<double>(),
                 x.size(0),
                 x.size(1),
                 z.size(1),
                 pool,
                 x.stride(0),
                 z.stride(0)};
  run_rows(p, x, p.K + p.N);
}

WB_REGISTER("run(Tensor x, Tensor w_sum, Tensor z, Tensor c, int pool, Tensor(a!) sums) -> ()", run)

// y (B) <- what the three sums and b_sum () are together, over the pool, scaled; flags (B) <- 1 where
// the third exceeds limit times that, or nothing is finite; returned: how many.
int64_t finish(const wb::Tensor& sums, const wb::Tensor& b_sum, int64_t pool, double scale,
               double limit, wb::Tensor& y, wb::Tensor& flags) {
  wb::expect(sums, "sums", wb::Double, {wb::any, 3});
  wb::expect(b_sum, "b_sum", wb::Double, {});
  wb::expect(y, "y", wb::Float, {sums.size(0)});
  wb::expect(flags, "flags", wb::ScalarType::Byte, {sums.size(0)});
  WB_CHECK(pool > 0, "pool: got ", pool, "; wants at least 1");
  const double *of_row = sums.const_data_ptr<double>(), more = *b_sum.const_data_ptr<double>();
  float* found = y.mutable_data_ptr<float>();
  uint8_t* flag = flags.mutable_data_ptr<uint8_t>();
  int64_t count = 0;
  for (int64_t i = 0; i < sums.size(0); ++i, of_row += 3) {
    const double total = of_row[0] + of_row[1] + more;
    found[i] = scaled(total / static_cast<double>(pool), scale);
    flag[i] = !(of_row[2] <= limit * std::fabs(total) && total - total == 0);  // NaN is flagged
    count += flag[i];
  }
  return count;
}

STABLE_TORCH_LIBRARY_FRAGMENT(WB_NAMESPACE, m) {
  m.def(
      "finish(Tensor sums, Tensor b_sum, int pool, float scale, float limit, Tensor(a!) y, "
      "Tensor(b!) flags) -> int");
}
STABLE_TORCH_LIBRARY_IMPL(WB_NAMESPACE, WB_DEVICE, m) { m.impl("finish", TORCH_BOX(&finish)); }
#else
// y (B) <- x (B, K) . w_sum (K) + b_sum () + the sums of |g + c|, g (B, M), c (M), over the pool
// (2, or 1 with M = 0), scaled; rows where sum |g| exceeds limit times that anew, from weight (N, K)
// and bias (N). flags (B), done (1) and partial (blocks of features, B) are scratch.
void run(const wb::Tensor& x, const wb::Tensor& g, const wb::Tensor& c, const wb::Tensor& w_sum,
         const wb::Tensor& b_sum, const wb::Tensor& weight, const wb::Tensor& bias, int64_t pool,
         double scale, double limit, wb::Tensor& flags, wb::Tensor& done, wb::Tensor& partial,
         wb::Tensor& y) {
  wb::expect_rows(x, "x");
  const int64_t B = x.size(0), K = x.size(1);
  wb::expect(weight, "weight", wb::Float, {wb::any, K});
  const int64_t N = weight.size(0), M = pool == 2 ? N / 2 : 0;
  expect_pool(pool, 1, N < 2 ? N : 2);
  wb::expect(g, "g", wb::Float, {B, M});
  wb::expect(c, "c", wb::Double, {M});
  wb::expect(w_sum, "w_sum", wb::Double, {K});
  wb::expect(b_sum, "b_sum", wb::Double, {});
  wb::expect(bias, "bias", wb::Float, {N});
  wb::expect(flags, "flags", wb::ScalarType::Byte, {B});
  wb::expect(done, "done", wb::ScalarType::Int, {1});
  wb::expect(partial, "partial", wb::Double, {(2 * M + kGuardFeatures - 1) / kGuardFeatures, B});
  wb::expect(y, "y", wb::Float, {B});
  wb::expect_aligned(g, "g");
  wb::expect_aligned(w_sum, "w_sum");
  const wb::Tensor* const all[] = {&g,    &c,     &w_sum, &b_sum,   &weight,
                                   &bias, &flags, &done,  &partial, &y};
  const char* const names[] = {"g",    "c",     "w_sum", "b_sum",   "weight",
                               "bias", "flags", "done",  "partial", "y"};
  for (int t = 0; t < 10; ++t) wb::expect_same_device(x, "x", *all[t], names[t]);
  const Pooled p{x.const_data_ptr<float>(),
                 g.const_data_ptr<float>(),
                 c.const_data_ptr<double>(),
                 w_sum.const_data_ptr<double>(),
                 b_sum.const_data_ptr<double>(),
                 weight.const_data_ptr<float>(),
                 bias.const_data_ptr<float>(),
                 y.mutable_data_ptr<float>(),
                 flags.mutable_data_ptr<uint8_t>(),
                 reinterpret_cast<unsigned*>(done.mutable_data_ptr<int32_t>()),
                 partial.mutable_data_ptr<double>(),
                 B,
                 K,
                 M,
                 N,
                 pool,
                 x.stride(0),
                 scale,
                 limit};
  run_rows(p, x, K + M);
}

WB_REGISTER(
    "run(Tensor x, Tensor g, Tensor c, Tensor w_sum, Tensor b_sum, Tensor weight, Tensor bias, "
    "int pool, float scale, float limit, Tensor(a!) flags, Tensor(b!) done, Tensor(c!) partial, "
    "Tensor(d!) y) -> ()",
    run)
#endif

}  // namespace
