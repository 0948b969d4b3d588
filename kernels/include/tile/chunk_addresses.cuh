#pragma once
// Shared-memory addresses of the chunks that a lane passes to ldmatrix.

#include <ptx/mma.cuh>
#include <tile/async_copy.cuh>

// `first` is the address of chunk 0 or 1 of a row. The swizzle flips the same bits of every
// address, so a step of an unrolled product costs at most one XOR.
template <int columns>
struct ChunkAddresses {
  SharedAddress first;

  template <int height>
  __device__ __forceinline__ ChunkAddresses(operand (&tile)[height][columns], int row, int chunk)
      : first(at(tile, row, chunk)) {}

  // Returns the address `rows` rows down (a multiple of 8) and `chunks` to the right (even).
  __device__ __forceinline__ SharedAddress operator()(int rows, int chunks) const {
    constexpr int span = swizzle_span(columns / in_chunk), bytes = in_chunk * sizeof(operand);
    const int whole = chunks / span * span;
    SharedAddress address = first;
    address.bytes ^= (chunks - whole) * bytes;
    address.bytes += (rows * columns / in_chunk + whole) * bytes;
    return address;
  }
};
