// The halves of a batch as a torch op.
#include "batch_halves.h"
#include "stable.h"

namespace {

// half (B + rows, K), c (K), mean (K) <- of x (B, K), whose rows are at any stride; run: neighbouring
// columns whose means are in one of the rows behind half.
void run(const wb::Tensor& x, int64_t run, wb::Tensor& half, wb::Tensor& c, wb::Tensor& mean) {
  wb::expect_rows(x, "x");
  const int64_t B = x.size(0), K = x.size(1);
  WB_CHECK(B > 0, "x: got no sample; wants at least one");
  WB_CHECK(run > 0, "run: got ", run, "; wants at least 1");
  wb::expect(half, "half", wb::Float, {wb::any, K});
  WB_CHECK(half.size(0) >= B, "half: got ", half.size(0), " rows; wants ", B, " or more");
  wb::expect(c, "c", wb::Float, {K});
  wb::expect(mean, "mean", wb::Double, {K});
  const BatchHalves p{x.const_data_ptr<float>(),
                      half.mutable_data_ptr<float>(),
                      c.mutable_data_ptr<float>(),
                      mean.mutable_data_ptr<double>(),
                      B,
                      K,
                      x.stride(0),
                      half.size(0) - B,
                      run};
  constexpr int64_t kTask = 16384;  // elements: below them a second thread costs more
  const int64_t strips = (K + kStrip - 1) / kStrip, grain = kTask / (B * kStrip) + 1;
  wb::parallel_for(0, strips, grain, [&](int64_t begin, int64_t end) { launch(p, begin, end); });
}

WB_REGISTER("run(Tensor x, int run, Tensor(a!) half, Tensor(b!) c, Tensor(c!) mean) -> ()", run)

}  // namespace
