#pragma once
// A row of e4m3 numbers, multiplied by a scale when they are read.

#include <ptx/unpack_e4m3.cuh>

struct ScaledRow {
  const E4m3* data;
  float scale;

  __device__ __forceinline__ float operator[](int col) const {
    return e4m3_value(data[col]) * scale;
  }
  __device__ __forceinline__ ScaledRow operator+(int cols) const { return {data + cols, scale}; }
};
