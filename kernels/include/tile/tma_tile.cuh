#pragma once
// Tiles in shared memory, as TMA copies them and wgmma or ldmatrix reads them: a sequence of boxes
// with 128 bytes per row, 64 columns of 16-bit numbers. Columns are padded to whole boxes.

#include <tile/math.cuh>
#include <ptx/tma.cuh>

template <class T, int rows, int columns>
struct alignas(box_alignment) TmaTile {
  static constexpr int in_row = box_row_bytes / int(sizeof(T));
  static constexpr int count = cdiv(columns, in_row);
  T box[count][rows][in_row];

  // Returns the 16 bytes of a row from byte 16 * chunk on; chunks are swizzled within a box.
  __device__ __forceinline__ T* at(int row, int chunk) {
    return &box[chunk / 8][row][(chunk ^ row) % 8 * (in_row / 8)];
  }
};

// Starts copying a tile from a row and column on; `barrier` completes a phase when it has arrived.
template <class T, int rows, int columns>
__device__ __forceinline__ void load_async(TmaTile<T, rows, columns>& tile, const TensorMap& map,
                                           Barrier& barrier, int row, int head, int batch,
                                           int column = 0) {
  arrive_expect_tx(barrier, sizeof tile);
#pragma unroll
  for (int i = 0; i < tile.count; ++i)
    tma_load(tile.box[i], map, barrier, column + i * tile.in_row, row, head, batch);
}
