#pragma once
// The dtype in which keys and values are stored: here the dtype of operands. Where they are e4m3
// with scales, the host puts kernels/with/attention/kv_dtype.cuh in place of this header.

#include <attention/batch.cuh>

using Stored = operand;
using StoredKeys = Tensor<const operand>;
using StoredValues = Tensor<const operand>;
constexpr int in_operand = 1;  // stored numbers

// The scales of a head's keys and values: none.
template <class Arrays>
struct Scaling {
  __device__ __forceinline__ Scaling(const Arrays&, int, int) {}
};
