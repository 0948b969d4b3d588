#pragma once
// With a block mask's map, a kernel visits only tiles that show a pair, and evaluates the mask
// expression only in partial tiles, which also hide one. Without a map all tiles are visited.
//
// The host writes above every kernel has_key_tiles and has_row_tiles: whether the launch has a map
// of the tiles of keys for each tile of rows, or of the tiles of rows for each tile of keys.

template <bool used>
struct TileMap {
  // Returns the first tile of `size` keys or rows to visit that does not lie before `first`.
  template <int size>
  __device__ __forceinline__ int from(int first) const {
    return first;
  }
  // Returns the next tile to visit after the one that begins with `first`.
  template <int size>
  __device__ __forceinline__ int after(int first) const {
    return first + size;
  }
  // Returns the distance to that tile.
  template <int size>
  __device__ __forceinline__ int stride(int) const {
    return size;
  }
  // Whether the mask is known to show all pairs of a tile.
  template <int size>
  __device__ __forceinline__ bool is_full(int) const {
    return false;
  }
};

// Element t of a line is 2 * n, or 2 * n + 1 if that tile is partial: n is the first tile from t on
// that shows a pair, or the number of tiles.
template <>
struct TileMap<true> {
  const int* line;

  template <int size>
  __device__ __forceinline__ int from(int first) const {
    return (line[first / size] >> 1) * size;
  }
  template <int size>
  __device__ __forceinline__ int after(int first) const {
    return from<size>(first + size);
  }
  template <int size>
  __device__ __forceinline__ int stride(int first) const {
    return after<size>(first) - first;
  }
  template <int size>
  __device__ __forceinline__ bool is_full(int first) const {
    return line[first / size] == first / size * 2;
  }
};
