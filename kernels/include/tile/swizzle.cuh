#pragma once
// A swizzle of 16-byte chunks for tiles without padding. ldmatrix reads one chunk from each of 8
// rows; swizzled chunks fall into 8 different groups of 4 banks.

// Returns the number of adjacent chunks of a row that the swizzle permutes among themselves.
__host__ __device__ constexpr int swizzle_span(int chunks) {
  return chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : chunks % 2 == 0 ? 2 : 1;
}

// Returns a chunk's position: its index XOR the row, or XOR a group of rows that fills 128 bytes.
template <int chunks>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  constexpr int span = swizzle_span(chunks);
  return chunk ^ (row / (8 / span) & (span - 1));
}
