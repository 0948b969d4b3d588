#pragma once
// Recomputes dK or dV that is not finite, of keys `first` to `end` - 1, over `group` query heads.

#include <backward/parts/repair_gradients.cuh>
#include <backward/parts/row_range.cuh>

template <bool of_V, int width, int d, int dv, class T, class Stats>
__device__ void repair_keys(const Repair<d, dv, T, Stats>& repair, Tensor<result> gradient,
                            int group, int first, int end, int first_col) {
  const Extent& extent = repair.extent;
  const int batch = repair.batch, first_head = repair.kv_head * group;
  for (int key = first; key < min(end, extent.N); ++key) {
    RowSum<width> sum(first_col, of_V ? dv : d);
    for (int head = first_head; head < first_head + group; ++head) {
      for (int row = row_begin(extent, key); row < row_end(extent, key, 1); ++row) {
        const RawStats own = repair.stats(head, row);
        if (own.lse == -infinity || !extent_of_head(extent, head).sees(row, key)) continue;
        const auto made = repair.pair(head, row, key, own);
        sum.add(of_V ? made.p : made.dS, (of_V ? repair.dO : repair.Q).row(batch, head, row));
      }
    }
    sum.store(gradient.row(batch, repair.kv_head, key), of_V ? real(1) : repair.scorer.scale);
  }
}
