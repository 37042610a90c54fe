// The memory of folds that are gone, for those to come. A system clears memory before it hands it out:
// in fresh memory the fold of changed weights writes twice what it has to. Until it is used again the
// system may take back what is large (MADV_FREE), so that it lacks nowhere.
#pragma once
#include <cstddef>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "fresh_tensor.h"
#include "huge_pages.h"

namespace wb {
namespace {

class KeptMemory {
 public:
  // Of this file's library. Never destroyed: tensors may live longer than what is static.
  static KeptMemory& here() {
    static KeptMemory* const kept = new KeptMemory;
    return *kept;
  }

  // At least `bytes`, in large pages where the system has them: the last that came, if it fits.
  Tensor take(int64_t bytes) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (size_t i = blocks_.size(); i-- > 0;) {
        if (blocks_[i].numel() < bytes || blocks_[i].numel() / 2 >= bytes) continue;
        Tensor found = std::move(blocks_[i]);
        blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(i));
        return found;
      }
    }
    Tensor made = fresh({bytes}, aoti_torch_dtype_uint8());
    expect_huge_pages(made.mutable_data_ptr(), bytes);
    return made;
  }

  // To be kept, in place of the one that lies here longest where there are too many.
  void give(Tensor block) {
#ifdef MADV_FREE
    const int64_t bytes = block.numel();
    if (bytes >= kLarge && !advise(block.mutable_data_ptr(), bytes, MADV_FREE)) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_.push_back(std::move(block));
    if (blocks_.size() > kBlocks) blocks_.erase(blocks_.begin());
#endif
  }

 private:
  static constexpr size_t kBlocks = 4;
  // Pages that are marked, and written again, one by one: of a few MB that takes as long as the fold.
  static constexpr int64_t kLarge = int64_t{32} << 20;
  std::mutex mutex_;
  std::vector<Tensor> blocks_;  // bytes; who came first is first
};

// A matrix on the CPU, contiguous, not initialised. The memory of a large one is kept when it goes.
template <class T>
Tensor kept(int64_t rows, int64_t columns) {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>, "what folds are kept in");
  constexpr int64_t kLeast = int64_t{1} << 20;  // what is smaller the heap keeps
  constexpr bool is_float = std::is_same_v<T, float>;
  const int64_t bytes = rows * columns * static_cast<int64_t>(sizeof(T));
  if (bytes < kLeast)
    return fresh({rows, columns}, is_float ? aoti_torch_dtype_float32() : aoti_torch_dtype_float64());
  Tensor block = KeptMemory::here().take(bytes);
  void* const memory = block.mutable_data_ptr();
  return torch::stable::from_blob(
      memory, {rows, columns}, {columns, 1}, torch::headeronly::DeviceType::CPU,
      is_float ? Float : Double,
      [block](void*) mutable { KeptMemory::here().give(std::move(block)); });
}

}  // namespace
}  // namespace wb
