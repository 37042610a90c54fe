// Means of groups of rows on a CPU (mean_rows.h).
// Moves: W once, 4 N K bytes; w and w_exact, 12 K N / pool.
#include "group_mean.h"

#include "mean_rows.h"

static_assert(kStrip == kMeanStrip, "tasks are strips");

void launch(const GroupMean& p, int64_t begin, int64_t end) {
  take_means({p.W, p.w, p.w_exact, p.K, p.groups, p.pool}, begin, end);
}
