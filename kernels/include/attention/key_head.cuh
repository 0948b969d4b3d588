#pragma once
// The rows of one key head, for asynchronous copies of keys and values. For paged keys the host
// replaces this header with kernels/with/attention/key_head.cuh.

#include <attention/batch.cuh>
#include <tile/async_copy.cuh>

struct KeyHead : Head {
  template <class Arrays>
  __device__ KeyHead(Tensor<const operand> keys, const Arrays&, int batch, int head, int rows)
      : Head(keys, batch, head, rows) {}
};
