#pragma once
// Where chunks of 16 bytes lie in a tile whose rows follow each other without padding, so that 8
// rows' chunks of one column, which ldmatrix reads together, lie in 8 different groups of 4 banks.

// So many neighbours trade places with each other in rows of so many chunks.
__host__ __device__ constexpr int reach_of(int chunks) {
  return chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : chunks % 2 == 0 ? 2 : 1;
}

// The place of a chunk in its row of so many chunks: an exclusive or with bits of the row, as many
// as keep it inside the row.
template <int chunks>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  constexpr int reach = reach_of(chunks);
  return chunk ^ (row / (8 / reach) & (reach - 1));
}

// The place of a row, in tiles that are read by every second row too, two chunks of four rows
// together. Where the width is an odd multiple of 4 chunks, such rows would all lie in the same
// half of the banks; there the third and the fourth of four rows change places.
template <int chunks>
__device__ __forceinline__ int paired(int row) {
  static_assert(chunks % 4 == 0, "rows are made of 64 bytes");
  return chunks % 8 == 0 ? row : row ^ (row / 2 & 1);
}
