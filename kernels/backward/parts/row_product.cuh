#pragma once
// Computes rowsum(dO * O) of a row with several lanes of a warp. If rows are 16-byte aligned, each
// lane loads 16 bytes at a time, so that together the lanes read whole cache lines.

#include <tile/math.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

using EightOfO = uint4[8 * sizeof(result) / sizeof(uint4)];

// Returns the dot product of eight elements.
__device__ __forceinline__ float dot(const EightOfO& x, const uint4& y) {
  const result* a = reinterpret_cast<const result*>(&x);
  const scalar* b = reinterpret_cast<const scalar*>(&y);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += float(a[i]) * float(b[i]);
  return sum;
}

// Returns rowsum(dO * O) to all lanes that share the row, or 0 if the row does not exist.
template <int dv, int lanes>
__device__ __forceinline__ float row_product(const Tensor<const result>& O,
                                             const Tensor<const scalar>& dO, int batch, int head,
                                             int row, bool exists) {
  const int lane = threadIdx.x % lanes;
  float sum = 0;
  if (exists) {
    const result* output = O.row(batch, head, row);
    const scalar* gradient = dO.row(batch, head, row);
    if (dv % 8 == 0 && is_aligned(O) && is_aligned(dO)) {
#pragma unroll 4
      for (int i = 0; i < cdiv(dv, 8 * lanes); ++i) {
        const int eight = i * lanes + lane;
        if (eight < dv / 8)
          sum += dot(reinterpret_cast<const EightOfO*>(output)[eight],
                     reinterpret_cast<const uint4*>(gradient)[eight]);
      }
    } else {
      for (int col = lane; col < dv; col += lanes) sum += float(output[col]) * float(gradient[col]);
    }
  }
#pragma unroll
  for (int distance = lanes / 2; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(full_warp, sum, distance);
  return sum;
}
