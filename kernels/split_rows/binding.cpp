// Splitting an input in halves as a torch op.
#include "split_rows.h"
#include "stable.h"

namespace {

// hi, lo (2 pairs, rows rounded up to 8, 32), e (rows) <- x (rows, K) 2^columns[:K]. An empty centre
// (K) is none, an empty lo is not written.
void run(const wb::Tensor& x, const wb::Tensor& columns, const wb::Tensor& centre, wb::Tensor& hi,
         wb::Tensor& lo, wb::Tensor& e) {
  wb::expect_rows(x, "x");
  const int64_t rows = x.size(0), K = x.size(1);
  const bool centred = centre.numel() > 0;
  const int64_t pairs = (K + 63) / 64, height = (rows + 7) / 8 * 8;
  wb::expect(columns, "columns", wb::ScalarType::Char, {64 * pairs});
  if (centred) wb::expect(centre, "centre", wb::Float, {K});
  wb::expect(hi, "hi", wb::ScalarType::Half, {2 * pairs, height, 32});
  const bool both = lo.numel() > 0 || hi.numel() == 0;
  if (both) wb::expect(lo, "lo", wb::ScalarType::Half, {2 * pairs, height, 32});
  wb::expect(e, "e", wb::ScalarType::Int, {rows});
  for (const wb::Tensor* other : {&columns, &centre, static_cast<const wb::Tensor*>(&hi),
                                  static_cast<const wb::Tensor*>(&lo),
                                  static_cast<const wb::Tensor*>(&e)})
    wb::expect_same_device(x, "x", *other, "one of the others");
  const SplitRows p{x.const_data_ptr<float>(),
                    static_cast<const int8_t*>(columns.const_data_ptr()),
                    centred ? centre.const_data_ptr<float>() : nullptr,
                    static_cast<half*>(hi.mutable_data_ptr()),
                    both ? static_cast<half*>(lo.mutable_data_ptr()) : nullptr,
                    e.mutable_data_ptr<int32_t>(),
                    rows,
                    K,
                    x.stride(0)};
  const wb::OnDevice on(x);
  wb::check(launch(p, on.stream), "split rows");
}

WB_REGISTER(
    "run(Tensor x, Tensor columns, Tensor centre, Tensor(a!) hi, Tensor(b!) lo, Tensor(c!) e)"
    " -> ()",
    run)

}  // namespace
