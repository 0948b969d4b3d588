#pragma once
// Rows of O from the results of several blocks, one for each split of the keys.
//
// A split's sums are relative to its own maximum. They are rescaled to the largest maximum of all
// splits, added up, and divided once: the online softmax of splits instead of tiles. A split
// without a visible key has sums 0 and the lowest maximum, and adds nothing. Sums are made in the
// same order wherever this is done: four chains of every fourth split, and then their sum.

#include <attention/nonfinite.cuh>
#include <attention/score.cuh>
#include <ptx/cp_async.cuh>
#include <tile/math.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

constexpr int chains = 4;

// What a block leaves of a row: O before the division, and the maximum and the sum of P.
template <int dv>
struct Part {
  static constexpr int width = cdiv(dv, 16) * 16;
  float O[width];
};
struct Weight {
  float maximum, sum;
};

// What a row of sums is divided by.
__device__ __forceinline__ float inverse_of(float sum, const Extent& extent) {
  return sum == 0 ? 0.0f : extent.kept_factor() / sum;
}

// Whether the sum and the maximum say that the row has to be computed again.
__device__ __forceinline__ bool is_wrong(float sum, float maximum, const Extent& extent, int row) {
  const bool has_score =
      (has_sink || extent.kv_begin(row) < extent.kv_end(row)) && !(has_seat && sum == 0);
  return !(sum < infinity) || (has_score && is_huge(maximum));
}
