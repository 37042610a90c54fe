// Splitting a matrix in halves as a torch op.
#include "split_rows.h"
#include "stable.h"

namespace {

// hi, lo (2 pairs, rows rounded up to 8, 32), e (rows) <- v (rows, K) 2^(+-columns[:K]), float32 or
// float64. divide: by 2^columns, for weights. An empty centre (K) is none, an empty lo is not written.
void run(const wb::Tensor& v, const wb::Tensor& columns, const wb::Tensor& centre, bool divide,
         wb::Tensor& hi, wb::Tensor& lo, wb::Tensor& e) {
  WB_CHECK(v.dim() == 2, "v: got ", v.dim(), " dimensions; wants a (rows, K) matrix");
  const int64_t rows = v.size(0), K = v.size(1);
  const bool is_double = v.scalar_type() == wb::Double, centred = centre.numel() > 0;
  WB_CHECK(is_double || v.scalar_type() == wb::Float, "v: got ", wb::dtype_name(v.scalar_type()),
           "; wants float32 or float64");
  WB_CHECK(v.stride(1) == 1 || K <= 1 || rows == 0, "v: got columns ", v.stride(1),
           " elements apart; wants them adjacent: call .contiguous()");
  WB_CHECK(!centred || !is_double, "centre: wants a float32 v");
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
    wb::expect_same_device(v, "v", *other, "one of the others");
  const SplitRows p{v.const_data_ptr(),
                    static_cast<const int8_t*>(columns.const_data_ptr()),
                    centred ? centre.const_data_ptr<float>() : nullptr,
                    static_cast<half*>(hi.mutable_data_ptr()),
                    both ? static_cast<half*>(lo.mutable_data_ptr()) : nullptr,
                    e.mutable_data_ptr<int32_t>(),
                    rows,
                    K,
                    v.stride(0),
                    is_double,
                    divide};
  const wb::OnDevice on(v);
  wb::check(launch(p, on.stream), "split rows");
}

WB_REGISTER(
    "run(Tensor v, Tensor columns, Tensor centre, bool divide, Tensor(a!) hi, Tensor(b!) lo,"
    " Tensor(c!) e) -> ()",
    run)

}  // namespace
