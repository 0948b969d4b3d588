#pragma once
// What a kernel copies to shared memory of an array with an element for every pair: nothing, or
// what staged_pairs.cuh has, which the host includes where pair_bytes, an element's size, is not 0.

#include <attention/place.cuh>

struct NoPairs {
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
__device__ constexpr NoPairs no_pairs;

template <int bytes, int n>
struct StagedPairs;
template <int n>
struct StagedPairs<0, n> : NoPairs {};

template <int bytes, int n>
struct StagedColumns;
template <int n>
struct StagedColumns<0, n> : NoPairs {};

// Those of each of the warps that compute.
template <class Staged, int warps, bool used = Staged::is_used>
struct OfWarps;
template <class Staged, int warps>
struct OfWarps<Staged, warps, false> {
  __device__ __forceinline__ NoPairs own() { return {}; }
};
