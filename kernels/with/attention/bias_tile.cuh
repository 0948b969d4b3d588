#pragma once
// A shared-memory tile of a bias, or of another array indexed by query and key. The tile is empty
// if bias_bytes, an element's size, is 0; otherwise the host includes staged_bias_tile.cuh.

#include <attention/no_bias.cuh>

template <int bytes, int n>
struct StagedBias;
template <int n>
struct StagedBias<0, n> : NoBias {};

template <int bytes, int n>
struct StagedBiasColumns;
template <int n>
struct StagedBiasColumns<0, n> : NoBias {};

// One bias tile per consumer warp.
template <class Staged, int warps, bool used = Staged::is_used>
struct OfWarps;
template <class Staged, int warps>
struct OfWarps<Staged, warps, false> {
  __device__ __forceinline__ NoBias own(int = 0) { return {}; }
};
