#pragma once
// What asynchronous copies read keys and values from: the rows of a head. Where they lie in pages,
// the host puts kernels/with/attention/key_head.cuh in the place of this header.

#include <attention/batch.cuh>
#include <tile/async_copy.cuh>

struct KeyHead : Head {
  template <class Arrays>
  __device__ KeyHead(Tensor<const operand> keys, const Arrays&, int batch, int head, int rows)
      : Head(keys, batch, head, rows) {}
};
