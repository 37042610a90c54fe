// Memory in large pages. What a fold writes is large, and a system that hands it out in pages of 4 KB
// stops the writer at each: that costs more than the writing.
#pragma once
#include <cstdint>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace wb {

// Tells the system about the whole large pages within [memory, memory + bytes); false where it does not
// listen. Without any there is nothing to tell.
inline bool advise(void* memory, int64_t bytes, int advice) {
#ifdef __linux__
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / kPage * kPage;
  return begin >= end || madvise(reinterpret_cast<void*>(begin), end - begin, advice) == 0;
#else
  (void)memory, (void)bytes, (void)advice;
  return false;
#endif
}

// Asks that fresh memory come in large pages. Elsewhere than on Linux, and where the system does not
// want to, nothing happens.
inline void expect_huge_pages(void* memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  advise(memory, bytes, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}

}  // namespace wb
