// Splitting weights in halves, and folding them, as a torch op.
#include "split_weights.h"
#include "stable.h"

namespace {

// Of V (rows, K), which `fold` makes of W (at least rows group, K): columns (width), most (K + 1),
// e (rows), hi, lo (2 pairs, rows rounded up to 8, 32). Of means also these, mean (rows, K) in float
// and exact in double; of differences the sums (K) of W's columns, partial (slices, K) is scratch, and of
// the bias (2 rows) shifts (rows) and its total (1). Others are empty.
void run(const wb::Tensor& W, const wb::Tensor& bias, int64_t fold, int64_t group, int64_t slices,
         wb::Tensor& columns, wb::Tensor& most, wb::Tensor& e, wb::Tensor& hi, wb::Tensor& lo,
         wb::Tensor& mean, wb::Tensor& exact, wb::Tensor& partial, wb::Tensor& sums,
         wb::Tensor& shifts, wb::Tensor& total) {
  wb::expect_rows(W, "W");
  const int64_t K = W.size(1), rows = e.size(0), pairs = (K + 63) / 64;
  WB_CHECK(fold >= kWhole && fold <= kMean, "fold: got ", fold, "; wants 0, 1 or 2");
  WB_CHECK(group > 0 && rows * group <= W.size(0) && (fold != kDifference || group == 2) &&
               (fold != kWhole || group == 1),
           "group: got ", group, " for ", rows, " rows of ", W.size(0));
  WB_CHECK(K > 0 && slices > 0, "W, slices: want at least one column and slice");
  const int64_t height = (rows + 7) / 8 * 8;
  wb::expect(columns, "columns", wb::ScalarType::Char, {64 * pairs});
  wb::expect(most, "most", wb::ScalarType::Int, {K + 1});
  wb::expect(e, "e", wb::ScalarType::Int, {rows});
  wb::expect(hi, "hi", wb::ScalarType::Half, {2 * pairs, height, 32});
  wb::expect(lo, "lo", wb::ScalarType::Half, {2 * pairs, height, 32});
  if (fold == kMean) {
    wb::expect(mean, "mean", wb::Float, {rows, K});
    wb::expect(exact, "exact", wb::Double, {rows, K});
  }
  if (fold == kDifference) {
    wb::expect(partial, "partial", wb::Double, {slices, K});
    wb::expect(sums, "sums", wb::Double, {K});
    wb::expect(bias, "bias", wb::Float, {2 * rows});
    wb::expect(shifts, "shifts", wb::Double, {rows});
    wb::expect(total, "total", wb::Double, {1});
  }
  wb::expect_same_device(W, "W", bias, "bias");
  for (const wb::Tensor* other :
       {&columns, &most, &e, &hi, &lo, &mean, &exact, &partial, &sums, &shifts, &total})
    wb::expect_same_device(W, "W", *other, "one of the others");
  SplitWeights p{};
  p.W = W.const_data_ptr<float>();
  p.c = static_cast<int8_t*>(columns.mutable_data_ptr());
  p.most = most.mutable_data_ptr<int32_t>();
  p.e = e.mutable_data_ptr<int32_t>();
  p.hi = static_cast<half*>(hi.mutable_data_ptr());
  p.lo = static_cast<half*>(lo.mutable_data_ptr());
  p.mean = mean.mutable_data_ptr<float>();
  p.mean_exact = exact.mutable_data_ptr<double>();
  p.partial = partial.mutable_data_ptr<double>();
  p.s = sums.mutable_data_ptr<double>();
  p.bias = bias.const_data_ptr<float>();
  p.shift = shifts.mutable_data_ptr<double>();
  p.total = total.mutable_data_ptr<double>();
  p.rows = rows;
  p.K = K;
  p.width = 64 * pairs;
  p.stride = W.stride(0);
  p.group = group;
  p.slices = slices;
  p.fold = static_cast<Fold>(fold);
  const wb::OnDevice on(W);
  wb::check(launch(p, on.stream), "split weights");
}

WB_REGISTER(
    "run(Tensor W, Tensor bias, int fold, int group, int slices, Tensor(a!) columns,"
    " Tensor(b!) most, Tensor(c!) e, Tensor(d!) hi, Tensor(e!) lo, Tensor(f!) mean,"
    " Tensor(g!) exact, Tensor(h!) partial, Tensor(i!) sums, Tensor(j!) shifts,"
    " Tensor(k!) total) -> ()",
    run)

}  // namespace
