#pragma once
// Two warpgroups that share a block's 64 keys, because dK and dV of more than 128 columns fit into
// the registers of two, not of one. The first computes P^T and sums dV += P^T dO. The second gets P
// from it, computes dP^T and dS^T, and sums dK += dS^T Q. No product is computed twice.

#include <backward/parts/own_keys.cuh>

static_assert(Bc == warpgroup_rows && is_wide, "two warpgroups share 64 keys");

constexpr int of_dV = 0, of_dK = 1;  // the warpgroups, by what they sum

// P of a tile (times the slope, for modified scores) as registers hold it: thread i of one
// warpgroup writes what thread i of the other reads, so nothing is sorted, rounded or swizzled.
struct PassedP {
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
