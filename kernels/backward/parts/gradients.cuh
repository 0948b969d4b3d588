#pragma once
// Steps shared by the scalar backward kernels, for one row tile and one key tile: loads, and sums
// over the tile's rows or keys.
//
// A kernel's struct Shared holds Q and dO [rows], K and V [keys] as rows of scalars, lse and delta
// [rows], and P and dS as PTile<rows, keys>. A row that sees no key, or lies outside the array, has
// lse = -infinity and zeros in Q and dO, so it contributes to no sum.

#include <attention/tile_pair.cuh>
#include <tile/block_copy.cuh>
#include <tile/tensor.cuh>
#include <timeline.cuh>

template <int rows, int keys>
__device__ __forceinline__ bool sees(const TilePair<rows, keys>& pair, int row, int key) {
  return pair.extent.sees(pair.first_row + row, pair.first_key + key);
}

// Returns the smallest row length >= width that is an odd number of 4-byte words, so that 32
// threads can read one column of 32 rows without bank conflicts.
template <class T>
__host__ __device__ constexpr int odd_width(int width) {
  return sizeof(T) < 4 ? (cdiv(width, 2) | 1) * 2 : width | 1;
}

// Returns how many adjacent elements a thread computes, so that it reuses the values it reads.
__host__ __device__ constexpr int per_thread(int count) {
  return count % 4 == 0 ? 4 : count % 2 == 0 ? 2 : 1;
}

template <int rows, int keys>
using PTile = real[rows][odd_width<real>(keys)];

// Loads lse and delta of a row tile. The caller must synchronize before reading them.
template <int threads, int tile_rows>
__device__ __forceinline__ void load_row_sums(real (&tile_lse)[tile_rows],
                                              real (&tile_delta)[tile_rows], Tensor<const real> lse,
                                              Tensor<const real> delta, int batch, int head,
                                              int first_row, int M) {
  const timeline::Phase phase(timeline::loads, size_t(lse.data) / 16);
  share_out<threads, tile_rows, 1>([&](int i, int) {
    const int row = first_row + i;
    tile_lse[i] = row < M ? *lse.row(batch, head, row) : real(-infinity);
    tile_delta[i] = row < M ? *delta.row(batch, head, row) : real(0);
  });
}

// Loads Q or dO of a row tile. The tile's lse must already be in shared memory.
template <int threads, int width, int rows, int stride>
__device__ __forceinline__ void load_rows(scalar (&tile)[rows][stride], Tensor<const scalar> tensor,
                                          const real (&lse)[rows], int batch, int head,
                                          int first_row) {
  const timeline::Phase phase(timeline::loads, size_t(tensor.data) / 16);
  share_out<threads, rows * width, 8>([&](int i, int) {
    const int row = i / width, col = i % width;
    const bool counts = lse[row] != -infinity;
    tile[row][col] = counts ? tensor.row(batch, head, first_row + row)[col] : scalar(real(0));
  });
}

// Calls body(key, col, sum) with the sum of tile[row][key] * values[row][col] over the rows. If
// `at_edge` is set, hidden pairs are skipped, because 0 * NaN is not 0.
template <bool at_edge, int threads, int width, int rows, int keys, int stride, class Body>
__device__ __forceinline__ void sum_rows(const PTile<rows, keys>& tile,
                                         const scalar (&values)[rows][stride],
                                         const TilePair<rows, keys>& pair, Body body) {
  constexpr int count = per_thread(keys);
  share_out<threads, keys / count * width, 1>([&](int i, int) {
    const int key = i / width * count, col = i % width;
    real sums[count] = {};
#pragma unroll 4
    for (int row = 0; row < rows; ++row) {
      const real value = real(values[row][col]);
#pragma unroll
      for (int n = 0; n < count; ++n) {
        if (!at_edge || sees(pair, row, key + n)) sums[n] += tile[row][key + n] * value;
      }
    }
#pragma unroll
    for (int n = 0; n < count; ++n) body(key + n, col, sums[n]);
  });
}

// Calls body(row, col, sum) with the sum of tile[row][key] * values[key][col] over the keys.
template <bool at_edge, int threads, int width, int rows, int keys, int stride, class Body>
__device__ __forceinline__ void sum_keys(const PTile<rows, keys>& tile,
                                         const scalar (&values)[keys][stride],
                                         const TilePair<rows, keys>& pair, Body body) {
  constexpr int count = per_thread(rows);
  share_out<threads, rows / count * width, 1>([&](int i, int) {
    const int row = i / width * count, col = i % width;
    real sums[count] = {};
#pragma unroll 4
    for (int key = 0; key < keys; ++key) {
      const real value = real(values[key][col]);
#pragma unroll
      for (int n = 0; n < count; ++n) {
        if (!at_edge || sees(pair, row + n, key)) sums[n] += tile[row + n][key] * value;
      }
    }
#pragma unroll
    for (int n = 0; n < count; ++n) body(row + n, col, sums[n]);
  });
}

// Returns whether existing rows see all existing keys.
template <int rows, int keys>
__device__ __forceinline__ bool sees_all(const TilePair<rows, keys>& pair) {
  return (!has_mask_mod || pair.is_full()) && pair.reaches_all();
}

// Sums over rows. In tiles without hidden pairs, the whole block skips the test for them.
template <int threads, int width, int rows, int keys, int stride, class Body>
__device__ __forceinline__ void sum_over_rows(const real (&tile)[rows][odd_width<real>(keys)],
                                              const scalar (&values)[rows][stride],
                                              const TilePair<rows, keys>& pair, Body body) {
  const timeline::Phase phase(timeline::arithmetic, rows * keys * width / threads);
  if (sees_all(pair))
    sum_rows<false, threads, width, rows, keys>(tile, values, pair, body);
  else
    sum_rows<has_mask, threads, width, rows, keys>(tile, values, pair, body);
}

template <int threads, int width, int rows, int keys, int stride, class Body>
__device__ __forceinline__ void sum_over_keys(const real (&tile)[rows][odd_width<real>(keys)],
                                              const scalar (&values)[keys][stride],
                                              const TilePair<rows, keys>& pair, Body body) {
  const timeline::Phase phase(timeline::arithmetic, rows * keys * width / threads);
  if (sees_all(pair))
    sum_keys<false, threads, width, rows, keys>(tile, values, pair, body);
  else
    sum_keys<has_mask, threads, width, rows, keys>(tile, values, pair, body);
}
