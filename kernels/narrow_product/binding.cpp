// The narrow product as a torch op.
#include "narrow_product.h"
#include "stable.h"

namespace {

// z (B, N) <- x (B, K) W^T, W (N, K); rows of all three at any stride.
void run(const wb::Tensor& x, const wb::Tensor& W, wb::Tensor& z) {
  wb::expect_rows(x, "x");
  wb::expect_rows(W, "W");
  wb::expect_rows(z, "z");
  const NarrowProduct p{x.const_data_ptr<float>(),
                        W.const_data_ptr<float>(),
                        z.mutable_data_ptr<float>(),
                        x.size(0),
                        x.size(1),
                        W.size(0),
                        x.stride(0),
                        W.stride(0),
                        z.stride(0)};
  WB_CHECK(W.size(1) == p.K, "W: has ", W.size(1), " features, wants ", p.K, " as x");
  WB_CHECK(z.size(0) == p.B && z.size(1) == p.N, "z: wants (", p.B, ", ", p.N, ")");
  const int64_t tasks = (p.N + kOutputs - 1) / kOutputs;
  constexpr int64_t kTask = 32768;  // multiplications: below it a second thread costs more
  const int64_t each = std::max<int64_t>(1, p.B * p.K * kOutputs);
  wb::parallel_for(0, tasks, std::max<int64_t>(1, kTask / each),
                   [&](int64_t begin, int64_t end) { launch(p, begin, end); });
}

WB_REGISTER("run(Tensor x, Tensor W, Tensor(a!) z) -> ()", run)

}  // namespace
