#pragma once
// The results of attention over parts of the keys: rows of their outputs, with the logarithm of the
// sum of exp(score) that each row has, its weight among the parts.
//
// A group of `lanes` threads has a row, of all rows of all heads and batch elements. Each thread
// takes `vector` columns at a time, which lie side by side, so that they are one access. `room` is
// the most parts that a launch can have.
#include <tile/math.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

static_assert(warp_size % lanes == 0 && threads % lanes == 0, "a row's threads are in one warp");

template <class T, class Sum>
struct Part {
  Tensor<T> out;
  Tensor<Sum> lse;
};
template <class T, class Sum>
struct Parts {
  Part<T, Sum> part[room];
};

// Columns that are read and written at once.
struct alignas(vector * sizeof(scalar)) Columns {
  scalar x[vector];
};
__device__ __forceinline__ Columns& columns_at(scalar* row, int col) {
  return *reinterpret_cast<Columns*>(row + col);
}
__device__ __forceinline__ const Columns& columns_at(const scalar* row, int col) {
  return *reinterpret_cast<const Columns*>(row + col);
}

// The number of a thread's row, which may be past the last one.
__device__ __forceinline__ unsigned long long row_of_thread() {
  return (unsigned long long)blockIdx.x * (threads / lanes) + threadIdx.x / lanes;
}
// Where a row is; its number may need more than 32 bits.
struct Row {
  int batch, head, row;
};
__device__ __forceinline__ Row row_numbered(unsigned long long number, int M, int heads) {
  const unsigned long long of_head = number / unsigned(M);
  return {int(of_head / unsigned(heads)), int(of_head % unsigned(heads)),
          int(number % unsigned(M))};
}
template <class T>
__device__ __forceinline__ T* at(const Tensor<T>& tensor, const Row& row) {
  return tensor.row(row.batch, row.head, row.row);
}

// A part whose row saw no key adds nothing, whatever its output is.
__device__ __forceinline__ bool adds_nothing(real lse) {
  return lse == -infinity;
}
// exp(lse - relative_to).
__device__ __forceinline__ real weight_of(real lse, real relative_to) {
  return adds_nothing(lse) ? real(0) : exp(lse - relative_to);
}
