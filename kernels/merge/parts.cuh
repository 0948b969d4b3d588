#pragma once
// The results of attention over parts of the keys: rows of their outputs, with the logarithm of the
// sum of exp(score) that each row has, its weight among the parts.
//
// A group of `lanes` threads has a row, of all rows of all heads and batch elements. Each thread
// takes 16 bytes of columns at a time, in accesses of `vector` columns, the most that are aligned
// in all rows. So a column belongs to the same thread, whatever the strides are. `room` is the
// largest number of parts in a launch.
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

constexpr int width = 16 / sizeof(scalar);
static_assert(width % vector == 0, "accesses end where a thread's columns end");

struct alignas(vector * sizeof(scalar)) Access {
  scalar x[vector];
};
// A thread's columns from `col` on; those past the last one are 0, and are not written.
struct Columns {
  Access access[width / vector] = {};

  __device__ __forceinline__ scalar& operator[](int i) { return access[i / vector].x[i % vector]; }
  __device__ __forceinline__ void load(const scalar* row, int col, int dv) {
#pragma unroll
    for (int i = 0; i < width; i += vector)
      if (col + i < dv) access[i / vector] = *reinterpret_cast<const Access*>(row + col + i);
  }
  __device__ __forceinline__ void store(scalar* row, int col, int dv) const {
#pragma unroll
    for (int i = 0; i < width; i += vector)
      if (col + i < dv) *reinterpret_cast<Access*>(row + col + i) = access[i / vector];
  }
};

// Returns the number of a thread's row, which may be past the last one.
__device__ __forceinline__ unsigned long long row_of_thread() {
  return (unsigned long long)blockIdx.x * (threads / lanes) + threadIdx.x / lanes;
}
// The position of a row, whose number may need more than 32 bits.
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
