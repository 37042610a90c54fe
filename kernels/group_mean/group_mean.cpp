// Means of groups of rows on a CPU (mean_rows.h).
// Moves: W once, 4 N K bytes; w and w_exact, 12 K N / pool.
#include "group_mean.h"

#include "mean_rows.h"

namespace {

Means of(const GroupMean& p) { return {p.W, p.w, p.w_exact, p.K, p.groups, p.pool}; }

}  // namespace

int64_t tasks_of(const GroupMean& p) { return tasks_of(of(p)); }

int64_t grain_of(const GroupMean& p) { return grain_of(of(p)); }

void launch(const GroupMean& p, int64_t begin, int64_t end) { take_means(of(p), begin, end); }
