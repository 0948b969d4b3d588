#pragma once
// Sums that came out as infinity or NaN, for what pairs that do not count brought in: their weight
// is 0, but 0 * NaN is NaN. That is rare, so products take all pairs of tiles, and such sums are
// computed once more, by the pairs that count. So are those of which 16 bits could not hold a term.

#include <mask.cuh>
#include <tensor.cuh>
#include <warp.cuh>

// Whether one of the warp's sums is infinite or NaN.
template <int count>
__device__ __forceinline__ bool is_strange(const float (&sums)[count]) {
  bool strange = false;
#pragma unroll
  for (int i = 0; i < count; ++i) strange |= !(fabs(sums[i]) < infinity);
  return __any_sync(full_warp, strange);
}

// P and dS of a row and a key, which a warp computes together.
struct Pair {
  float weight, slope;
};

__device__ __forceinline__ Pair weigh_pair(const scalar* q, const scalar* k, const scalar* grad,
                                           const scalar* v, float lse2, float delta, float scale,
                                           int lane) {
  float score = 0, slope = 0;
  for (int j = lane; j < d; j += warp_size) score += float(q[j]) * float(k[j]);
  for (int j = lane; j < dv; j += warp_size) slope += float(grad[j]) * float(v[j]);
  const float weight = exp2f(warp_sum(score) * (scale * log2e) - lse2);
  return {weight, weight * (warp_sum(slope) - delta)};
}
