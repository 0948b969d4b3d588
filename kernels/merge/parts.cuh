#pragma once
// Results of attention over parts of the keys: rows of outputs and their lse, the logarithm of
// sum(exp(score)), which determines a part's weight.
//
// A group of `lanes` threads processes one row of one head and batch element. Each thread owns 16
// bytes of columns at a time, and accesses `vector` columns at once, the most that are aligned in
// all rows. So the thread that owns a column does not depend on strides. `room` is the largest
// number of parts in a launch.
#include <tile/math.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

static_assert(warp_size % lanes == 0 && threads % lanes == 0, "a row's threads share a warp");

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
static_assert(width % vector == 0, "a thread owns whole accesses");

struct alignas(vector * sizeof(scalar)) Access {
  scalar x[vector];
};
// A thread's columns from `col` on. Columns past the last one are loaded as 0 and not stored.
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

// Returns the index of the thread's row, which may be past the last row.
__device__ __forceinline__ unsigned long long row_of_thread() {
  return (unsigned long long)blockIdx.x * (threads / lanes) + threadIdx.x / lanes;
}
// The position of a row, whose index may need more than 32 bits.
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

// Returns whether a part has no visible key in a row; its output is then ignored.
__device__ __forceinline__ bool adds_nothing(real lse) {
  return lse == -infinity;
}
// Returns exp(lse - relative_to), or 0 for a row without visible keys.
__device__ __forceinline__ real weight_of(real lse, real relative_to) {
  return adds_nothing(lse) ? real(0) : exp(lse - relative_to);
}
