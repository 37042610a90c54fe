// Large pages of fresh memory (huge_pages.h asks for them), taken by a thread before it writes. Linux
// clears a page so that the place that was asked for comes last: asked for by its start, it is cleared
// backwards, at half the speed. And threads that come to a page together clear one each, of which one
// is kept. So each asks for pages of its own, by their ends.
#pragma once
#include <cstdint>
#ifdef __linux__
#include <sys/mman.h>
#endif

// What thread `self` of `sharers` asks for of [memory, memory + bytes), which they write together, front
// to back: a page each, before the first of these pages is written.
class FreshPages {
 public:
  FreshPages(void* memory, int64_t bytes, int64_t self = 0, int64_t sharers = 1)
      : begin_(reinterpret_cast<uintptr_t>(memory)),
        end_(begin_ + bytes),
        next_((begin_ + kPage - 1) / kPage * kPage),
        own_(self * kPage),
        together_(sharers * kPage) {}

  // To be called before the first `bytes` are written. What is there stays as it is; elsewhere than on
  // Linux, and before 5.14, nothing happens.
  void reach(int64_t bytes) {
    for (; next_ < begin_ + bytes; next_ += together_) {
#if defined(__linux__) && defined(MADV_POPULATE_WRITE)
      const uintptr_t after = next_ + own_ + kPage;
      if (after <= end_) madvise(reinterpret_cast<void*>(after - kSmall), kSmall, MADV_POPULATE_WRITE);
#endif
    }
  }

 private:
  static constexpr uintptr_t kPage = uintptr_t{1} << 21, kSmall = uintptr_t{1} << 12;
  const uintptr_t begin_, end_;
  uintptr_t next_;  // the first of the pages that come next
  const uintptr_t own_, together_;
};
