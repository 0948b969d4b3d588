#pragma once
// The steps that the backward kernels share, on a tile of Br rows and a tile of Bc keys: P and dS
// from what the forward pass left, and the sums over the tile's rows and over its keys.
//
// A kernel's struct Shared has Q [Br], dO [Br], K [Bc] and V [Bc] as rows of scalars, lse [Br] and
// delta [Br], and P and dS as Weights. A row that sees no key, or is none of M, has lse = -infinity
// and zeros for Q and dO: it adds nothing to any sum.

#include <attention/mask.cuh>
#include <attention/pairs.cuh>
#include <tile/tensor.cuh>
#include <tile/block_copy.cuh>

// The least row length >= width that is an odd number of 4 bytes: 32 threads that read one column
// of 32 rows then touch every bank.
template <class T>
__host__ __device__ constexpr int odd_width(int width) {
  return sizeof(T) < 4 ? (cdiv(width, 2) | 1) * 2 : width | 1;
}

// So many neighbours share what a thread reads for all of them.
__host__ __device__ constexpr int together(int count) {
  return count % 4 == 0 ? 4 : count % 2 == 0 ? 2 : 1;
}

using Weights = real[Br][odd_width<real>(Bc)];

// lse and delta of a row tile; a barrier has to follow.
template <class Shared>
__device__ __forceinline__ void load_row_sums(Shared& shared, Tensor<const real> lse,
                                              Tensor<const real> delta, int batch, int head,
                                              int first_row, int M) {
  share_out<Br, 1>([&](int i, int) {
    const int row = first_row + i;
    shared.lse[i] = row < M ? *lse.row(batch, head, row) : real(-infinity);
    shared.delta[i] = row < M ? *delta.row(batch, head, row) : real(0);
  });
}

// Q and dO of a row tile whose lse is there.
template <int width, int stride>
__device__ __forceinline__ void load_rows(scalar (&tile)[Br][stride], Tensor<const scalar> tensor,
                                          const real (&lse)[Br], int batch, int head,
                                          int first_row) {
  share_out<Br * width, 8>([&](int i, int) {
    const int row = i / width, col = i % width;
    const bool counts = lse[row] != -infinity;
    tile[row][col] = counts ? tensor.row(batch, head, first_row + row)[col] : scalar(real(0));
  });
}

// P = exp(S - lse) and dS = P * (dO V^T - delta), without the scale; 0 where a pair does not count.
template <class Shared>
__device__ __forceinline__ void weigh(Shared& shared, const Pairs& pairs, real scale) {
  constexpr int keys = together(Bc);
  share_out<Br*(Bc / keys), 1>([&](int i, int) {
    const int row = i % Br, key = i / Br * keys;
    real dots[keys] = {}, slopes[keys] = {};
#pragma unroll 4
    for (int k = 0; k < d; ++k) {
      const real q = real(shared.Q[row][k]);
#pragma unroll
      for (int n = 0; n < keys; ++n) dots[n] += q * real(shared.K[key + n][k]);
    }
#pragma unroll 4
    for (int k = 0; k < dv; ++k) {
      const real grad = real(shared.dO[row][k]);
#pragma unroll
      for (int n = 0; n < keys; ++n) slopes[n] += grad * real(shared.V[key + n][k]);
    }
#pragma unroll
    for (int n = 0; n < keys; ++n) {
      const bool counts = shared.lse[row] != -infinity && pairs.see(row, key + n);
      const real weight = counts ? exp(dots[n] * scale - shared.lse[row]) : real(0);
      shared.P[row][key + n] = weight;
      shared.dS[row][key + n] = counts ? weight * (slopes[n] - shared.delta[row]) : real(0);
    }
  });
}

// body(key, col, sum over the rows of weights[row][key] * values[row][col]). At the edge of a mask
// pairs that it hides are left out: 0 * NaN would not be 0.
template <bool at_edge, int width, int stride, class Body>
__device__ __forceinline__ void sum_rows(const Weights& weights, const scalar (&values)[Br][stride],
                                         const Pairs& pairs, Body body) {
  constexpr int keys = together(Bc);
  share_out<Bc / keys * width, 1>([&](int i, int) {
    const int key = i / width * keys, col = i % width;
    real sums[keys] = {};
#pragma unroll 4
    for (int row = 0; row < Br; ++row) {
      const real value = real(values[row][col]);
#pragma unroll
      for (int n = 0; n < keys; ++n) {
        if (!at_edge || pairs.see(row, key + n)) sums[n] += weights[row][key + n] * value;
      }
    }
#pragma unroll
    for (int n = 0; n < keys; ++n) body(key + n, col, sums[n]);
  });
}

// body(row, col, sum over the keys of weights[row][key] * values[key][col]), likewise.
template <bool at_edge, int width, int stride, class Body>
__device__ __forceinline__ void sum_keys(const Weights& weights, const scalar (&values)[Bc][stride],
                                         const Pairs& pairs, Body body) {
  constexpr int rows = together(Br);
  share_out<Br / rows * width, 1>([&](int i, int) {
    const int row = i / width * rows, col = i % width;
    real sums[rows] = {};
#pragma unroll 4
    for (int key = 0; key < Bc; ++key) {
      const real value = real(values[key][col]);
#pragma unroll
      for (int n = 0; n < rows; ++n) {
        if (!at_edge || pairs.see(row + n, key)) sums[n] += weights[row + n][key] * value;
      }
    }
#pragma unroll
    for (int n = 0; n < rows; ++n) body(row + n, col, sums[n]);
  });
}

// The same at the edge of a mask or away from it, which is the same for the whole block.
template <int width, int stride, class Body>
__device__ __forceinline__ void sum_over_rows(const Weights& weights,
                                              const scalar (&values)[Br][stride],
                                              const Pairs& pairs, Body body) {
  if (pairs.all()) {
    sum_rows<false, width>(weights, values, pairs, body);
  } else {
    sum_rows<has_mask, width>(weights, values, pairs, body);
  }
}

template <int width, int stride, class Body>
__device__ __forceinline__ void sum_over_keys(const Weights& weights,
                                              const scalar (&values)[Bc][stride],
                                              const Pairs& pairs, Body body) {
  if (pairs.all()) {
    sum_keys<false, width>(weights, values, pairs, body);
  } else {
    sum_keys<has_mask, width>(weights, values, pairs, body);
  }
}
