// Fresh memory in large pages. What a fold writes is large and new each time, and a system that hands
// it out in pages of 4 KB stops the writer at each: that costs more than the writing.
#pragma once
#include <cstdint>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace wb {

// Asks that whole large pages within [memory, memory + bytes) come as such. Elsewhere than on Linux,
// and where the system does not want to, nothing happens.
inline void expect_huge_pages(void* memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}

}  // namespace wb
