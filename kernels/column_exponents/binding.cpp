// Exponents of the columns of a matrix as a torch op.
#include "column_exponents.h"
#include "stable.h"

namespace {

// c[:K] <- exponents above the columns of v (rows, K), float32 or float64; most (K) is zeros before,
// and what of c lies behind K stays.
void run(const wb::Tensor& v, wb::Tensor& most, wb::Tensor& c) {
  WB_CHECK(v.dim() == 2 && v.size(0) > 0 && v.size(1) > 0, "v: wants a matrix that is not empty");
  const bool is_double = v.scalar_type() == wb::Double;
  WB_CHECK(is_double || v.scalar_type() == wb::Float, "v: got ", wb::dtype_name(v.scalar_type()),
           "; wants float32 or float64");
  WB_CHECK(v.stride(1) == 1 || v.size(1) == 1, "v: got columns ", v.stride(1),
           " elements apart; wants them adjacent: call .contiguous()");
  wb::expect(most, "most", wb::ScalarType::Int, {v.size(1)});
  wb::expect(c, "c", wb::ScalarType::Char, {wb::any});
  WB_CHECK(c.size(0) >= v.size(1), "c: got ", c.size(0), " exponents; wants at least ", v.size(1));
  wb::expect_same_device(v, "v", most, "most");
  wb::expect_same_device(v, "v", c, "c");
  const ColumnExponents p{v.const_data_ptr(),
                          most.mutable_data_ptr<int32_t>(),
                          static_cast<int8_t*>(c.mutable_data_ptr()),
                          v.size(0),
                          v.size(1),
                          v.stride(0),
                          is_double};
  const wb::OnDevice on(v);
  wb::check(launch(p, on.stream), "column exponents");
}

WB_REGISTER("run(Tensor v, Tensor(a!) most, Tensor(b!) c) -> ()", run)

}  // namespace
