#pragma once
// A tile of a bias, or of another array of queries by keys, in shared memory: empty, or that of
// staged_bias_tile.cuh, which the host includes where bias_bytes, an element's size, is not 0.

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

template <int bytes, int n>
struct StagedBias;
template <int n>
struct StagedBias<0, n> : NoBias {};

template <int bytes, int n>
struct StagedBiasColumns;
template <int n>
struct StagedBiasColumns<0, n> : NoBias {};

// A tile for each warp that computes.
template <class Staged, int warps, bool used = Staged::is_used>
struct OfWarps;
template <class Staged, int warps>
struct OfWarps<Staged, warps, false> {
  __device__ __forceinline__ NoBias own() { return {}; }
};
