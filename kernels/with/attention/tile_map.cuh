#pragma once
// A kernel visits only the tiles that a block mask's map lists: those with visible pairs. It
// evaluates the mask expression only in partial tiles. Without a map it visits all tiles.
//
// The host defines has_key_tiles and has_row_tiles above every kernel: true if the launch has a map
// of key tiles for each row tile, or of row tiles for each key tile.

template <bool used>
struct TileMap {
  // Returns the start of the first tile to visit, of `size` keys or rows, at or after `first`.
  template <int size>
  __device__ __forceinline__ int from(int first) const {
    return first;
  }
  // Returns the start of the next tile to visit after the tile at `first`.
  template <int size>
  __device__ __forceinline__ int after(int first) const {
    return first + size;
  }
  // Returns the distance from `first` to the next tile.
  template <int size>
  __device__ __forceinline__ int stride(int) const {
    return size;
  }
  // Returns whether all pairs of a tile are known to be visible.
  template <int size>
  __device__ __forceinline__ bool is_full(int) const {
    return false;
  }
};

// Element t of a line is 2 * n, or 2 * n + 1 if tile n is partial. Tile n is the first tile from t
// on with a visible pair; n is the number of tiles if there is none.
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
