#pragma once
// The rows of a head, from which asynchronous copies read keys and values. Where they lie in pages,
// the host puts kernels/with/attention/key_head.cuh in place of this header.

#include <attention/batch.cuh>
#include <tile/async_copy.cuh>

struct KeyHead : Head {
  template <class Arrays>
  __device__ KeyHead(Tensor<const operand> keys, const Arrays&, int batch, int head, int rows)
      : Head(keys, batch, head, rows) {}
};
