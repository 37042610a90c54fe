// New tensors without torch's dispatcher: what that reads is not in the cache when a model is called
// now and then.
#pragma once
#include <initializer_list>

#include "stable.h"

namespace wb {

// Of one dimension or two, or of none: contiguous, on the CPU, not initialised. dtype: as
// aoti_torch_dtype_...() says.
inline Tensor fresh(std::initializer_list<int64_t> shape, int32_t dtype) {
  const int64_t columns = shape.size() > 0 ? *(shape.end() - 1) : 1, strides[] = {columns, 1};
  WB_CHECK(shape.size() <= 2, "a new tensor: got more than two dimensions");
  AtenTensorHandle made;
  const auto said =
      aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.begin(),
                               strides + (2 - shape.size()), dtype, aoti_torch_device_type_cpu(), 0,
                               &made);
  WB_CHECK(said == AOTI_TORCH_SUCCESS, "torch has no memory for a tensor of this size");
  return Tensor(made);
}

}  // namespace wb
