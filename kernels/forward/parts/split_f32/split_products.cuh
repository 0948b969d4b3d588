#pragma once
// Products of split float32 operands (split_pair.cuh) in which each warp owns its rows.
//
// x y = (xh + xl / 2^11) (yh + yl / 2^11). The product xl yl is left out, because it is below
// float32 precision. The two products with one low part have separate accumulators, scaled by 2^11.

#include <forward/parts/split_f32/split_pair.cuh>
#include <ptx/mma.cuh>
#include <tile/chunk_addresses.cuh>
#include <timeline.cuh>

static_assert(sizeof(operand) == 2, "these tensor-core products take 16-bit numbers");

// Accumulators of the products with a low part. If `apart`, products with A's low part and with B's
// low part have separate accumulators, so that neither waits for the other.
template <int m, int n, bool apart>
struct LowSums {
  static constexpr int kinds = apart ? 2 : 1;
  float sums[kinds][m][n][4] = {};

  __device__ __forceinline__ float operator()(int i, int j, int e) const {
    return kinds == 1 ? sums[0][i][j][e] : sums[0][i][j][e] + sums[kinds - 1][i][j][e];
  }
};

// D += A B for 16 columns of A and 16 columns of B, which are fragments 2 j and 2 j + 1 of D.
// Products with a low part are accumulated in C.
template <int m, int n, bool apart>
__device__ __forceinline__ void multiply_split(float (&D)[m][n][4], LowSums<m, n, apart>& C, int j,
                                               const unsigned (&high)[m][4],
                                               const unsigned (&low)[m][4],
                                               const unsigned (&B_high)[4],
                                               const unsigned (&B_low)[4]) {
  const auto multiply = [&](float (&sums)[m][n][4], const unsigned (&a)[m][4],
                            const unsigned (&b)[4]) {
#pragma unroll
    for (int i = 0; i < 2 * m; ++i)
      multiply_add<operand>(sums[i / 2][2 * j + i % 2], a[i / 2], b[i % 2 * 2], b[i % 2 * 2 + 1]);
  };
  multiply(C.sums[0], high, B_low);
  multiply(D, high, B_high);
  multiply(C.sums[apart], low, B_high);
}

// Split fragments of Q and K for one step of a warp's product.
template <int m, int n>
struct StepFragments {
  unsigned high[m][4], low[m][4], key_high[n / 2][4], key_low[n / 2][4];
};

// S = Q K^T for the warp's rows and the tile's keys from first_key on; `at_once` steps are
// unrolled. With four, the fragments of each step are loaded during the previous step.
template <int at_once = 1, bool apart = false, int Br, int Bc, int depth, int m, int n>
__device__ __forceinline__ void multiply_scores(operand (&Q)[2][Br][depth],
                                                operand (&K)[2][Bc][depth], float (&S)[m][n][4],
                                                int first_row, int lane, int first_key = 0) {
  const timeline::Phase phase(timeline::products);
  const int own_row = first_row + lane % 16, own_key = first_key + lane / 16 * 8 + lane % 8;
  ChunkAddresses queries(Q[0], own_row, lane / 16), keys(K[0], own_key, lane / 8 % 2);
  LowSums<m, n, apart> C;
  const auto load = [&](StepFragments<m, n>& to, int k) {
#pragma unroll
    for (int i = 0; i < m; ++i) {
      ldmatrix(to.high[i], queries(i * step, 2 * k));
      ldmatrix(to.low[i], queries(Br + i * step, 2 * k));
    }
#pragma unroll
    for (int j = 0; j < n / 2; ++j) {
      ldmatrix(to.key_high[j], keys(j * step, 2 * k));
      ldmatrix(to.key_low[j], keys(Bc + j * step, 2 * k));
    }
  };
  const auto multiply = [&](const StepFragments<m, n>& from) {
#pragma unroll
    for (int j = 0; j < n / 2; ++j)
      multiply_split(S, C, j, from.high, from.low, from.key_high[j], from.key_low[j]);
  };
  constexpr int steps = depth / step;
  if constexpr (at_once == 4 && steps % 4 == 0) {
    constexpr int span = 4 * step * int(sizeof(operand));  // swizzle span of a row in bytes
    StepFragments<m, n> fragments[2];
    load(fragments[0], 0);
#pragma unroll 1
    for (int left = steps / 4; left > 0; --left) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (k == 3) {  // after the last step, wraps to the first (unused)
          const int on = left > 1 ? span : span - depth * int(sizeof(operand));
          queries.first.bytes += on;
          keys.first.bytes += on;
        }
        load(fragments[(k + 1) % 2], (k + 1) % 4);
        multiply(fragments[k % 2]);
      }
    }
  } else {
#pragma unroll at_once
    for (int k = 0; k < steps; ++k) {
      StepFragments<m, n> fragments;
      load(fragments, k);
      multiply(fragments);
    }
  }
#pragma unroll
  for (int i = 0; i < m * n * 4; ++i) {
    float& x = S[i / (4 * n)][i / 4 % n][i % 4];
    x = fmaf(C(i / (4 * n), i / 4 % n, i % 4), low_unit, x);
  }
}
