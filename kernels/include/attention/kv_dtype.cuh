#pragma once
// The dtype of stored keys and values: that of operands. For e4m3 with scales the host replaces
// this header with kernels/with/attention/kv_dtype.cuh.

#include <attention/batch.cuh>

using Stored = operand;
using StoredKeys = Tensor<const operand>;
using StoredValues = Tensor<const operand>;
constexpr int in_operand = 1;  // stored numbers per operand

// The scales of a head's keys and values; empty here.
template <class Arrays>
struct Scaling {
  __device__ __forceinline__ Scaling(const Arrays&, int, int) {}
};
