#pragma once
// What two warpgroups do that share a block's 64 keys, since dK and dV of more than 128 columns fit
// into the registers of two, not of one. The first computes P^T = exp(S^T) and sums dV += P^T dO.
// The second computes dP^T and dS^T, for which the first passes P on, and sums dK += dS^T Q. No
// product is computed twice.

#include <backward/parts/own_keys.cuh>

static_assert(Bc == warpgroup_rows && is_wide, "two warpgroups share 64 keys");

constexpr int of_dV = 0, of_dK = 1;  // the warpgroups, by what they sum

// P of a tile as registers hold it: thread i of one warpgroup writes what thread i of another
// reads, so nothing is sorted, rounded or swizzled.
struct PassedWeights {
  float4 fours[Br / 8][warpgroup_size];

  __device__ __forceinline__ void write(const Sums<Br>& P) {
    const int mine = opaque(int(threadIdx.x)) % warpgroup_size;
#pragma unroll
    for (int i = 0; i < Br / 8; ++i)
      fours[i][mine] = float4{P[4 * i], P[4 * i + 1], P[4 * i + 2], P[4 * i + 3]};
  }

  __device__ __forceinline__ void read(Sums<Br>& P) const {
    const int mine = opaque(int(threadIdx.x)) % warpgroup_size;
#pragma unroll
    for (int i = 0; i < Br / 8; ++i) {
      const float4 four = fours[i][mine];
      P[4 * i] = four.x, P[4 * i + 1] = four.y;
      P[4 * i + 2] = four.z, P[4 * i + 3] = four.w;
    }
  }
};

// A warp's keys of the gradient that its warpgroup has summed, to memory: computed once more if
// there is anything strange in it.
template <int warpgroup, int count>
__device__ __forceinline__ void leave_gradient(const float (&sums)[count], const Own& own,
                                               Tensor<const scalar> Q, Tensor<const scalar> K,
                                               Tensor<const scalar> V, Tensor<const scalar> dO,
                                               Tensor<scalar> dK, Tensor<scalar> dV,
                                               const RowSums* row_sums, const Work& work, int heads,
                                               int N, int causal_offset, int window_offset,
                                               float scale) {
  constexpr bool is_dV = warpgroup == of_dV;
  const int first_key = work.first_key + own.first_key();
  if (has_nonfinite(sums))
    recompute_keys<!is_dV, is_dV>(Q, K, V, dO, dK, dV, row_sums, work, first_key, heads, N,
                                  causal_offset, window_offset, scale);
  else if constexpr (is_dV)
    store_gradient<dv>(sums, 1, first_key, dV, work.batch, work.kv_head, N, own.lane);
  else
    store_gradient<d>(sums, scale, first_key, dK, work.batch, work.kv_head, N, own.lane);
}
