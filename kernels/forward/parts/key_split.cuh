#pragma once
// Which keys of a tile of Q a block reads: here all. If several blocks share the keys of a tile,
// the host replaces this header with kernels/splitting/forward/parts/key_split.cuh.

struct KeySplits {
  __device__ __forceinline__ KeySplits(float*, float*, float*, int) {}
  static constexpr int count() { return 1; }
  template <class Tile>
  __device__ __forceinline__ void take(Tile&, int) const {}
  template <int dv, class... Args>
  __device__ __forceinline__ bool store(const Args&...) const {
    return false;
  }
};
