#pragma once
// A tile of a bias, or of another array of queries by keys, in shared memory: empty, or the tile of
// staged_bias_tile.cuh, which the host includes if bias_bytes, an element's size, is not 0.

#include <attention/no_bias.cuh>

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
