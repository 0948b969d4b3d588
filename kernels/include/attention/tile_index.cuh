#pragma once
// Tile indices over all heads and batch elements. For packed sequences the host replaces this
// header with kernels/with/attention/tile_index.cuh.

#include <attention/batch.cuh>

// Converts a tile index over all heads to a place. A tile has `size` rows of `together` heads.
template <int size, int together = 1, class Arrays>
__device__ __forceinline__ Place place_of_rows(int index, const Sizes& sizes, const Arrays&,
                                               int heads) {
  return place(index, cdiv(sizes.M * together, size), heads);
}
template <int size, class Arrays>
__device__ __forceinline__ Place place_of_keys(int index, const Sizes& sizes, const Arrays&,
                                               int heads) {
  return place(index, max(cdiv(sizes.N, size), 1), heads);
}
template <int size, class Arrays>
__device__ __forceinline__ long long tile_of_rows(const Sizes& sizes, const Arrays&, int batch,
                                                  int head, int heads, int row) {
  return ((long long)batch * heads + head) * cdiv(sizes.M, size) + row / size;
}
template <int size, class Arrays>
__device__ __forceinline__ int tiles_of_rows(const Sizes& sizes, const Arrays&) {
  return cdiv(sizes.M, size);
}
