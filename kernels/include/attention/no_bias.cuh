#pragma once
// An empty replacement for a bias tile where none is copied to shared memory.

#include <attention/score_context.cuh>

struct NoBias {
  static constexpr bool is_used = false;
  struct Part {};

  template <class Place, class... Firsts>
  __device__ __forceinline__ void load(const Place&, Firsts...) const {}
  __device__ __forceinline__ void complete() const {}
  template <class... Places>
  __device__ __forceinline__ Part part(Places...) const {
    return {};
  }
  __device__ __forceinline__ Index index(Index key, const Part&, int, int, bool) const {
    return key;
  }
};
__device__ constexpr NoBias no_bias;
