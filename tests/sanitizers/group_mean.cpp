#include "group_mean.h"

#include "common.h"

using driver::Buffer;

void one(int64_t groups, int64_t pool, int64_t K, bool both) {
  driver::begin_case();
  const Buffer<float> W(groups * pool * K);
  const auto w = driver::output<float>(groups * K);
  const auto w_exact = driver::output<double>(both ? groups * K : 0);
  const GroupMean p{W, w, both ? w_exact.get() : nullptr, K, groups, pool};
  driver::in_parts(tasks_of(p), [&](int64_t begin, int64_t end) { launch(p, begin, end); });
  w.expect_written("w");
  if (both) w_exact.expect_written("w_exact");
}

void cases() {
  for (const int64_t groups : {1, 3})
    for (const int64_t pool : {1, 2, 4, 7, 16})
      for (const int64_t K : {1, 16, 17, 1023, 1025, 9001})
        for (const bool both : {false, true}) one(groups, pool, K, both);
  one(300, 2, 9001, true);  // w has more than one large page
}
