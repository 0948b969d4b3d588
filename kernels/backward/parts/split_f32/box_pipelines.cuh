#pragma once
// Pipelines of tiles of split operands, box by box. Each box of 64 columns is loaded again as soon
// as products have read it, which hides loads even if there is one stage.

#include <forward/parts/split_f32/split_wgmma.cuh>

template <int stages, int columns>
struct BoxPipelines {
  static constexpr int count = cdiv(columns, box_columns);
  Pipeline<stages> box[count];

  __device__ __forceinline__ void init(int consumers, int loads = 1) {
    for (Pipeline<stages>& pipeline : box) pipeline.init(consumers, loads);
  }
  // Producer: loads box i of a tile once it is free.
  template <int all_rows>
  __device__ __forceinline__ void load(TmaTile<operand, all_rows, columns>& tile, int i,
                                       const SplitMaps& maps, PipelineState<stages> state, int row,
                                       int head, int batch) {
    Barrier& full = box[i].acquire(state);
    arrive_expect_tx(full, sizeof tile.box[i]);
    load_split_box(tile, i, maps, full, row, head, batch);
  }
  // Consumers: release all boxes, for products that are awaited together.
  __device__ __forceinline__ void release(PipelineState<stages> state) {
#pragma unroll
    for (Pipeline<stages>& pipeline : box) pipeline.release(state);
  }
};
