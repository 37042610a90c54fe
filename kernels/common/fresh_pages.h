// Large pages of fresh memory (huge_pages.h asks for them), taken by a thread before it writes. Linux
// clears a page so that the place that was asked for comes last: asked for by its start, it is cleared
// backwards, at half the speed. And threads that come to a page together clear one each, of which one
// is kept. So each asks for pages of its own, by their ends.
#pragma once
#include <cstdint>
#ifdef __linux__
#include <sys/mman.h>
#endif

// What a thread asks for of [memory, memory + bytes), which several write together, front to back: of
// each `all` pages those from `first` to `last`, before the first of them all is written.
class FreshPages {
 public:
  FreshPages(void* memory, int64_t bytes, int64_t first = 0, int64_t last = 1, int64_t all = 1)
      : begin_(reinterpret_cast<uintptr_t>(memory)),
        end_(begin_ + bytes),
        next_((begin_ + kPage - 1) / kPage * kPage),
        first_(first * kPage),
        last_(last * kPage),
        together_(all * kPage) {}

  // To be called before the first `bytes` are written. What is there stays as it is; elsewhere than on
  // Linux, and before 5.14, nothing happens.
  void reach(int64_t bytes) {
    for (; next_ < begin_ + bytes; next_ += together_)
      for (uintptr_t after = next_ + first_ + kPage; after <= next_ + last_; after += kPage) {
#if defined(__linux__) && defined(MADV_POPULATE_WRITE)
        if (after <= end_)
          madvise(reinterpret_cast<void*>(after - kSmall), kSmall, MADV_POPULATE_WRITE);
#endif
      }
  }

 private:
  static constexpr uintptr_t kPage = uintptr_t{1} << 21, kSmall = uintptr_t{1} << 12;
  const uintptr_t begin_, end_;
  uintptr_t next_;  // the first of the pages that come next
  const uintptr_t first_, last_, together_;
};
