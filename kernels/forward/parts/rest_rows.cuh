#pragma once
// The rows of a ragged array that no earlier launch has written.

#include <attention/batch.cuh>

// Returns the used rows of a batch element.
template <class Arrays>
__device__ __forceinline__ PackedRows used_rows(const Arrays& mods, int batch, int rows) {
  if constexpr (of_keys)
    return used_keys(mods, batch, rows);
  else
    return used_queries(mods, batch, rows);
}

// Returns the sequence that contains a packed row, if any does; finds it by binary search.
template <class Arrays>
__device__ __forceinline__ int sequence_of(const Arrays& mods, int row) {
  const int* offsets = of_keys ? mods.cu_seqlens_k_.data : mods.cu_seqlens_q_.data;
  int sequence = 0, last = mods.cu_seqlens_q_.size[0] - 2;
  while (sequence < last) {
    const int middle = (sequence + last + 1) / 2;
    if (offsets[middle] <= row)
      sequence = middle;
    else
      last = middle - 1;
  }
  return sequence;
}

// Returns whether earlier launches have written a row.
template <class Arrays>
__device__ __forceinline__ bool is_used(const Arrays& mods, int batch, int row, int rows) {
  if constexpr (Arrays::is_packed) batch = sequence_of(mods, row);
  const PackedRows own = used_rows(mods, batch, rows);
  return row >= own.first && row < own.first + own.count;
}
