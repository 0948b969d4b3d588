#pragma once
// Recomputes dQ of rows that are not finite.

#include <backward/parts/repair_gradients.cuh>

// Recomputes dQ for rows `first` … `end` - 1, at most `width` columns from `col`, below col_end.
template <int width, int d, int dv, class T, class Stats>
__device__ void repair_rows(const Repair<d, dv, T, Stats>& repair, Tensor<result> dQ, int head,
                            int first, int end, int col, int col_end = d) {
  const Extent& extent = repair.extent;
  for (int row = first; row < min(end, extent.M); ++row) {
    const RawStats own = repair.stats(head, row);
    RowSum<width> sum(col, min(d, col_end));
    const int last = own.lse != -infinity ? extent.kv_end(row) : 0;
    for (int key = extent.kv_begin(row); key < last; ++key)
      if (extent_of_head(extent, head).shown(row, key))
        sum.add(repair.pair(head, row, key, own).dS,
                repair.K.row(repair.batch, repair.kv_head, key));
    sum.store(dQ.row(repair.batch, head, row), repair.scorer.scale);
  }
}
