// What the drivers of the sanitizers share: memory that ends where a tensor ends, and what is in it.
//
// A driver includes its problem.h and defines `cases`: for each edge shape it makes the buffers that
// a launcher gets, and calls it as the binding does, over ranges of rows. main runs them for each
// kind of numbers. An argument i makes buffer i of every case one element short: a kernel that uses
// the last element then runs into the sanitizer, which is the control of the whole.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>

namespace driver {

inline int shortened = -1, made = 0, most = 0;
inline uint64_t state = 1;

// What inputs hold. A row that is not finite must not lead an index astray.
enum Kind { kNormal, kZeros, kLow, kHigh, kSomeNaN, kKinds };
inline Kind kind = kNormal;

inline double number() {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  const double unit = static_cast<double>(state >> 40) / (1 << 23) - 1;
  const double inf = std::numeric_limits<double>::infinity();
  switch (kind) {
    case kZeros:
      return unit < 0 ? -0.0 : 0.0;
    case kLow:
      return -inf;
    case kHigh:
      return inf;
    case kSomeNaN:
      return unit > 0.9 ? std::nan("") : unit;
    default:
      return unit;
  }
}

template <class T>
constexpr T poison() {
  return std::numeric_limits<T>::has_quiet_NaN ? std::numeric_limits<T>::quiet_NaN()
                                               : std::numeric_limits<T>::max() / 4;
}

// `count` elements on the heap and no more: numbers, or poison for what is to be written.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count, bool written = false) : count_(count), written_(written) {
    const bool is_short = made++ == shortened && count > 0;
    most = std::max(most, made);
    there_ = count - is_short;
    memory_.reset(new T[there_]);
    for (int64_t i = 0; i < there_; ++i)
      memory_[i] = written ? poison<T>() : static_cast<T>(number());
  }

  operator T*() const { return memory_.get(); }
  T* get() const { return memory_.get(); }

  // Of an output, after the call: no element is left as it was.
  void expect_written(const char* name) const {
    if (shortened >= 0 || kind != kNormal) return;
    for (int64_t i = 0; i < count_; ++i)
      if (memory_[i] != memory_[i]) {
        std::printf("%s[%lld] of %lld is not written\n", name, static_cast<long long>(i),
                    static_cast<long long>(count_));
        std::exit(3);
      }
  }

 private:
  int64_t count_, there_ = 0;
  bool written_;
  std::unique_ptr<T[]> memory_;
};

template <class T>
Buffer<T> output(int64_t count) {
  return Buffer<T>(count, true);
}

// Elements of rows at a stride: the last one ends with its last feature.
inline int64_t strided(int64_t rows, int64_t columns, int64_t stride) {
  return rows > 0 ? (rows - 1) * stride + columns : 0;
}

inline void begin_case() { made = 0; }

// f(begin, end) over parts of `count`, as several threads have them.
template <class F>
void in_parts(int64_t count, F f) {
  const int64_t half = count / 2;
  if (half > 0) f(0, half);
  if (half < count) f(half, count);
}

}  // namespace driver

void cases();

int main(int argc, char** argv) {
  if (argc > 1) driver::shortened = std::atoi(argv[1]);
  for (int kind = 0; kind < driver::kKinds; ++kind) {
    driver::kind = static_cast<driver::Kind>(kind);
    cases();
  }
  std::printf("%d\n", driver::most);
}
