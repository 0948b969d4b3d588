#pragma once
// A row of e4m3 numbers, which are multiplied by a scale.

#include <ptx/unpack_e4m3.cuh>

struct ScaledRow {
  const E4m3* data;
  float scale;

  __device__ __forceinline__ float operator[](int col) const {
    return e4m3_value(data[col]) * scale;
  }
  __device__ __forceinline__ ScaledRow operator+(int cols) const { return {data + cols, scale}; }
};
