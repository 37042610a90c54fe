// The product of split matrices as a torch op.
#include "split_product.h"
#include "stable.h"

namespace {

using wb::Tensor;

const half* halves(const Tensor& t, const char* name, int64_t rows, int64_t K, const Tensor& z) {
  wb::expect(t, name, wb::ScalarType::Half, {(K + 63) / 64 * 2, (rows + 7) / 8 * 8, 32});
  wb::expect_same_device(z, "z", t, name);
  return static_cast<const half*>(t.const_data_ptr());
}

const int* exponents(const Tensor& t, const char* name, int64_t rows, const Tensor& z) {
  wb::expect(t, name, wb::ScalarType::Int, {rows});
  wb::expect_same_device(z, "z", t, name);
  return t.const_data_ptr<int32_t>();
}

// x, and W where it is multiplied as it is: rows start at 16 bytes.
void expect_rows_at_16_bytes(const Tensor& t, const char* name) {
  wb::expect_aligned(t, name);
  WB_CHECK(t.stride(0) % 4 == 0, name, ": got rows ", t.stride(0),
           " numbers apart; wants a multiple of 4");
}

void read_shapes(SplitProduct& p, const Tensor& x, const Tensor& W, const Tensor& f,
                 const Tensor& z) {
  wb::expect_rows(x, "x");
  wb::expect_rows(W, "W");
  const bool whole = W.numel() > 0;
  p.B = x.size(0), p.K = x.size(1);
  WB_CHECK(p.K > 0, "x: got no features; wants at least one");
  p.N = f.dim() == 1 && f.size(0) > 0 ? f.size(0) : W.size(0);
  wb::expect(z, "z", wb::Float, {wb::any, p.B, p.N});
  wb::expect_same_device(x, "x", z, "z");
  wb::expect_same_device(x, "x", W, "W");
  WB_CHECK(!whole || (W.size(0) == p.N && W.size(1) == p.K), "W: wants (", p.N, ", ", p.K, ")");
  p.x = x.const_data_ptr<float>(), p.x_stride = x.stride(0);
  p.W = whole ? W.const_data_ptr<float>() : nullptr, p.W_stride = W.stride(0);
  p.parts = z.size(0);
  WB_CHECK(p.B <= INT32_MAX && p.N <= INT32_MAX && p.K <= INT32_MAX, "x, W: more than 2^31 rows");
  WB_CHECK(p.parts <= (p.K + 63) / 64, "z: got ", p.parts, " parts; wants one for 64 of K at most");
}

// z (parts, B, N), whose sum over the parts is x W^T, from their halves and exponents; with an empty
// wl (and xl) from the his alone. With an empty xh, x (B, K) is split where it is multiplied, its columns
// raised by c. W (N, K) itself is for rows of W that are not finite, which go into the first part
// whole; with an empty one no such row is looked for. With an empty wh, too, x and W are multiplied as
// they are, rounded to TF32. promote: of 64 of k, what is accumulated before it is rounded to nearest;
// more than 1 for a split x and both halves alone, 0 for all of k, for a split x and one product alone.
void run(const Tensor& x, const Tensor& xh, const Tensor& xl, const Tensor& e, const Tensor& c,
         const Tensor& W, const Tensor& wh, const Tensor& wl, const Tensor& f, int64_t promote,
         Tensor& z) {
  SplitProduct p{};
  read_shapes(p, x, W, f, z);
  const bool both = wl.numel() > 0;
  if (xh.numel() > 0) {
    p.xh = halves(xh, "xh", p.B, p.K, z);
    if (both) p.xl = halves(xl, "xl", p.B, p.K, z);
    p.e = exponents(e, "e", p.B, z);
  } else {
    expect_rows_at_16_bytes(x, "x");
  }
  if (wh.numel() > 0) {
    wb::expect(c, "c", wb::ScalarType::Char, {(p.K + 63) / 64 * 64});
    wb::expect_same_device(x, "x", c, "c");
    p.c = static_cast<const int8_t*>(c.const_data_ptr());
    p.wh = halves(wh, "wh", p.N, p.K, z);
    if (both) p.wl = halves(wl, "wl", p.N, p.K, z);
    p.f = exponents(f, "f", p.N, z);
  } else {
    WB_CHECK(p.xh == nullptr && p.W != nullptr && !both, "wh: got none; wants x and W as they are");
    expect_rows_at_16_bytes(W, "W");
  }
  p.z = z.mutable_data_ptr<float>();
  p.promote = promote;
  const bool may = p.xl != nullptr ? promote > 1 : promote == 0 && p.xh != nullptr && !both;
  WB_CHECK(promote == 1 || may, "promote: got ", promote,
           "; wants 1, more with a split x and both halves, or 0 with a split x and one");
  if (z.numel() == 0) return;
  const wb::OnDevice on(x);
  wb::check(launch(p, on.stream), "split product");
}

WB_REGISTER(
    "run(Tensor x, Tensor xh, Tensor xl, Tensor e, Tensor c, Tensor W, Tensor wh, Tensor wl,"
    " Tensor f, int promote, Tensor(a!) z) -> ()",
    run)

}  // namespace
