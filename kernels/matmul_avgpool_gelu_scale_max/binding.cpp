// The avgpool chain as a torch op. The one file here that knows torch; every rung is built with it,
// in the form it is called in: "chain" reads weight and bias, "folded" their means; "product",
// "parts", "winner" and "blocks" come after torch's product.
#include <cmath>
#include <optional>

#include "problem.h"
#include "stable.h"

namespace {

// A scale that float32 can't hold is infinite for a float32 model.
double as_float32_sees(double scale) {
  return std::isinf(static_cast<float>(scale)) ? static_cast<float>(scale) : scale;
}

PoolChain chain_of(const wb::Tensor& like, wb::Tensor& y, int64_t B, double scale) {
  wb::expect(y, "y", wb::Float, {B});
  wb::expect_same_device(like, "the input", y, "y");
  PoolChain p{};
  p.y = y.mutable_data_ptr<float>();
  p.B = B;
  p.scale = as_float32_sees(scale);
  return p;
}

// work: elements that a row reads.
void run_rows(const PoolChain& p, const wb::Tensor& on_device, int64_t work) {
  if (p.B == 0) return;
#ifdef WB_CUDA
  const wb::OnDevice on(on_device);
  wb::check(launch(p, on.stream), "avgpool chain");
#else
  // Elements of a task: below this a second thread costs more than it gives.
  constexpr int64_t kTask = 32768;
  const int64_t grain = work < kTask ? kTask / (work > 0 ? work : 1) : 1;
  wb::parallel_for(0, p.B, grain, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
#endif
}

#if !defined(WB_PRODUCT) && !defined(WB_PARTS)
void read_x(PoolChain& p, const wb::Tensor& x) {
  wb::expect_rows(x, "x");
  p.x = x.const_data_ptr<float>();
  p.K = x.size(1);
  p.x_stride = x.stride(0);
}
#endif

#if !defined(WB_PRODUCT) && !defined(WB_CHAIN)
void read_b(PoolChain& p, const wb::Tensor& like, const wb::Tensor& b) {
  WB_CHECK(p.M > 0, "w: got no rows; wants at least one group of features");
  wb::expect(b, "b", wb::Float, {p.M});
  wb::expect_same_device(like, "the input", b, "b");
  p.b = b.const_data_ptr<float>();
}
#endif

#if !defined(WB_PRODUCT) && !defined(WB_CHAIN) && !defined(WB_PARTS)
#define WB_READS_FOLDED
void read_folded(PoolChain& p, const wb::Tensor& x, const wb::Tensor& w, const wb::Tensor& b) {
  read_x(p, x);
  wb::expect(w, "w", wb::Float, {wb::any, p.K});
  wb::expect_same_device(x, "x", w, "w");
  p.w = w.const_data_ptr<float>();
  p.M = w.size(0);
  read_b(p, x, b);
}
#endif

#if defined(WB_READS_FOLDED) && !defined(WB_FOLDED)
// w_exact (M, K) and b_exact (M) in double, or both empty.
void read_exact(PoolChain& p, const wb::Tensor& x, const wb::Tensor& w_exact,
                const wb::Tensor& b_exact) {
  wb::expect_same_device(x, "x", w_exact, "w_exact");
  wb::expect_same_device(x, "x", b_exact, "b_exact");
  if (b_exact.numel() == 0 && w_exact.numel() == 0) return;
  wb::expect(w_exact, "w_exact", wb::Double, {p.M, p.K});
  wb::expect_aligned(w_exact, "w_exact");
  wb::expect(b_exact, "b_exact", wb::Double, {p.M});
  p.w_exact = w_exact.const_data_ptr<double>();
  p.b_exact = b_exact.const_data_ptr<double>();
}
#endif

#if defined(WB_PARTS) || defined(WB_WINNER)
// (parts, B, M) for the B and the M there are; or any.
void read_parts(PoolChain& p, const wb::Tensor& u_parts, int64_t B, int64_t M) {
  wb::expect(u_parts, "u_parts", wb::Float, {wb::any, B, M});
  p.u_parts = u_parts.const_data_ptr<float>();
  p.parts = u_parts.size(0);
  p.M = u_parts.size(2);
}
#endif

#if defined(WB_CHAIN)
// y (B) <- the chain over x (B, K), rows at any stride; weight (N, K), bias (N).
void run(const wb::Tensor& x, const wb::Tensor& weight, const wb::Tensor& bias, int64_t pool,
         double scale, wb::Tensor& y) {
  wb::expect_rows(x, "x");
  PoolChain p = chain_of(x, y, x.size(0), scale);
  read_x(p, x);
  wb::expect(weight, "weight", wb::Float, {wb::any, p.K});
  const int64_t N = weight.size(0);
  wb::expect(bias, "bias", wb::Float, {N});
  WB_CHECK(0 < pool && pool <= N, "pool: got ", pool, "; wants 1 to out_features = ", N);
  wb::expect_same_device(x, "x", weight, "weight");
  wb::expect_same_device(x, "x", bias, "bias");
  p.W = weight.const_data_ptr<float>();
  p.bias = bias.const_data_ptr<float>();
  p.pool = pool;
  p.M = N / pool;
  run_rows(p, x, N * p.K);
}

WB_REGISTER("run(Tensor x, Tensor weight, Tensor bias, int pool, float scale, Tensor(a!) y) -> ()",
            run)

#elif defined(WB_FOLDED)
// y (B) <- x (B, K), rows at any stride; w (M, K), b (M).
void run(const wb::Tensor& x, const wb::Tensor& w, const wb::Tensor& b, double scale,
         wb::Tensor& y) {
  wb::expect_rows(x, "x");
  PoolChain p = chain_of(x, y, x.size(0), scale);
  read_folded(p, x, w, b);
  run_rows(p, x, p.M * p.K);
}

WB_REGISTER("run(Tensor x, Tensor w, Tensor b, float scale, Tensor(a!) y) -> ()", run)

#elif defined(WB_PRODUCT)
// y (B) <- u (B, M).
void run(const wb::Tensor& u, double scale, wb::Tensor& y) {
  wb::expect(u, "u", wb::Float, {wb::any, wb::any});
  PoolChain p = chain_of(u, y, u.size(0), scale);
  p.u = u.const_data_ptr<float>();
  p.M = u.size(1);
  WB_CHECK(p.M > 0, "u: got no columns; wants at least one group of features");
  run_rows(p, u, p.M);
}

WB_REGISTER("run(Tensor u, float scale, Tensor(a!) y) -> ()", run)

#elif defined(WB_PARTS)
// y (B) <- u_parts (parts, B, M), b (M).
void run(const wb::Tensor& u_parts, const wb::Tensor& b, double scale, wb::Tensor& y) {
  WB_CHECK(u_parts.dim() == 3, "u_parts: wants (parts, B, M)");
  PoolChain p = chain_of(u_parts, y, u_parts.size(1), scale);
  read_parts(p, u_parts, wb::any, wb::any);
  read_b(p, u_parts, b);
  run_rows(p, u_parts, p.parts * p.M);
}

WB_REGISTER("run(Tensor u_parts, Tensor b, float scale, Tensor(a!) y) -> ()", run)

#elif defined(WB_WINNER)
// y (B) <- u_parts (parts, B, M), whose winner is computed once more from x, w_exact, b_exact.
void run(const wb::Tensor& u_parts, const wb::Tensor& x, const wb::Tensor& w, const wb::Tensor& b,
         const wb::Tensor& w_exact, const wb::Tensor& b_exact, double scale, wb::Tensor& y) {
  wb::expect_rows(x, "x");
  PoolChain p = chain_of(x, y, x.size(0), scale);
  read_folded(p, x, w, b);
  read_exact(p, x, w_exact, b_exact);
  read_parts(p, u_parts, p.B, p.M);
  wb::expect_same_device(x, "x", u_parts, "u_parts");
  run_rows(p, x, p.parts * p.M);
}

WB_REGISTER(
    "run(Tensor u_parts, Tensor x, Tensor w, Tensor b, Tensor w_exact, Tensor b_exact, float "
    "scale, "
    "Tensor(a!) y) -> ()",
    run)

#else
// u (B, count): features first.. of x w^T + b. The first block begins `ends` and `at` anew, the last
// one, which has the last feature, writes y. A block of all features needs neither of the two, and
// without u the kernel multiplies by itself.
void run(std::optional<wb::Tensor> u, const wb::Tensor& x, const wb::Tensor& w, const wb::Tensor& b,
         const wb::Tensor& w_exact, const wb::Tensor& b_exact, int64_t first, double scale,
         std::optional<wb::Tensor> ends, std::optional<wb::Tensor> at, wb::Tensor& y) {
  wb::expect_rows(x, "x");
  PoolChain p = chain_of(x, y, x.size(0), scale);
  read_folded(p, x, w, b);
  read_exact(p, x, w_exact, b_exact);
  p.first = first;
  p.count = p.M;
  if (u) {
    wb::expect(*u, "u", wb::Float, {p.B, wb::any});
    wb::expect_same_device(x, "x", *u, "u");
    p.u = u->const_data_ptr<float>();
    p.count = u->size(1);
  }
  WB_CHECK(first >= 0 && p.count > 0 && first + p.count <= p.M, "first: got ", first, " with ",
           p.count, " features; wants a block of the ", p.M, " there are");
  WB_CHECK(ends.has_value() == at.has_value() && (ends || p.count == p.M), "ends: got ",
           ends ? "no at beside" : "nothing", "; wants both, kept from block to block");
  if (ends) {
    wb::expect(*ends, "ends", wb::Float, {p.B, 2});
    wb::expect(*at, "at", wb::ScalarType::Long, {p.B, 2});
    wb::expect_same_device(x, "x", *ends, "ends");
    wb::expect_same_device(x, "x", *at, "at");
    p.ends = ends->mutable_data_ptr<float>();
    p.at = at->mutable_data_ptr<int64_t>();
  }
  const int64_t product = p.u ? p.K : p.M * p.K;
  run_rows(p, x, p.count + (first + p.count == p.M ? product : 0));
}

WB_REGISTER(
    "run(Tensor? u, Tensor x, Tensor w, Tensor b, Tensor w_exact, Tensor b_exact, int first, "
    "float scale, Tensor(a!)? ends, Tensor(b!)? at, Tensor(c!) y) -> ()",
    run)
#endif

}  // namespace
