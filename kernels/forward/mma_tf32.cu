// mma_tf32: `mma_async` on float32: its operands are rounded to tf32, 8 bits of exponent and 10 of
// mantissa, its sums are float.
//
// Q and K are read as 16-bit numbers are, for a float is a pair of them: the fragments come out
// right. P's are not the accumulators of S as they lie, but the keys of a product may come in any
// order: index c is key 2c and c + 4 is key 2c + 1, and rows of V are taken so.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   grid (cdiv(M, Br) * heads * batch)    block (32 * Br / Wr): each warp owns Wr rows
//   the host sets: scalar, real, Br, Bc, Wr, d, dv, causal, threads, shared_bytes
#include <cp_async.cuh>
#include <fragments.cuh>
#include <mask.cuh>
#include <mma.cuh>
#include <shared.cuh>
#include <swizzle.cuh>
#include <tensor.cuh>
#include <tile.cuh>
#include <warp.cuh>

constexpr int depth = cdiv(d, step) * step;  // of Q and K, filled up with zeros
constexpr int in_chunk = 4;                  // elements in 16 bytes
constexpr int rank = 8;                      // of a product: its columns of A, its rows of B

struct Shared {
  scalar Q[Br][depth];
  scalar K[Bc][depth];
  scalar V[Bc][width];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(sizeof(scalar) == 4, "these tensor-core products take float32");
static_assert(threads == warp_size * Br / Wr, "each warp owns Wr rows");
static_assert(Wr % step == 0 && Bc % step == 0, "tiles are made of whole products");

template <int height, int columns>
__device__ __forceinline__ scalar* at(scalar (&tile)[height][columns], int row, int chunk) {
  const int place = paired<columns / in_chunk>(row);
  return &tile[place][swizzled<columns / in_chunk>(place, chunk) * in_chunk];
}

// Begins to copy rows of a head with `cols` columns, 16 bytes at a time; zeros outside it. Where
// rows do not lie so, elements are copied at once.
template <int cols, int height, int columns>
__device__ __forceinline__ void copy_tile(scalar (&tile)[height][columns], const scalar* head,
                                          long long stride, bool aligned, int first_row, int rows) {
  if (aligned) {
    const scalar* from = nullptr;
    share_out_rows<height, columns / in_chunk>([&](int row, int chunk, int turn) {
      const int count =
          cols % step == 0 ? in_chunk : max(0, min(in_chunk, cols - chunk * in_chunk));
      if (turn == 0)
        from = head + (first_row + row) * stride + chunk * in_chunk;
      else
        from += rows_in_turn<columns / in_chunk> * stride;
      copy_async(at(tile, row, chunk), from,
                 first_row + row < rows ? count * int(sizeof(scalar)) : 0);
    });
  } else {
    share_out_rows<height, columns / in_chunk>([&](int row, int chunk, int) {
      const scalar* from = head + (first_row + row) * stride + chunk * in_chunk;
      scalar* to = at(tile, row, chunk);
#pragma unroll 1
      for (int j = 0; j < in_chunk; ++j) {
        const bool inside = first_row + row < rows && chunk * in_chunk + j < cols;
        to[j] = inside ? from[j] : 0.0f;
      }
    });
  }
}

// Takes the sign of the scale, or its being 0, into Q, which leaves a positive scale.
__device__ void apply_sign(Shared& shared, float scale) {
  share_out<Br * depth, 1>(
      [&](int i, int) { shared.Q[i / depth][i % depth] *= scale < 0 ? -1.0f : 0.0f; });
}

constexpr float largest_tf32 = 3.401e38f;  // rounded down; what is above 3.402e38 becomes infinite

// Whether one of the chunks of V that this thread has copied holds an infinity or NaN, or what is
// infinite in tf32.
__device__ bool is_strange(Shared& shared) {
  bool strange = false;
  share_out_rows<Bc, width / in_chunk>([&](int row, int chunk, int) {
    const scalar* x = at(shared.V, row, chunk);
    for (int j = 0; j < in_chunk; ++j) strange |= !(fabs(x[j]) < largest_tf32);
  });
  return strange;
}

// Four matrices as `load_matrices` brings them, rounded.
__device__ __forceinline__ void load_rounded(unsigned (&r)[4], const scalar* row) {
  load_matrices(r, row);
#pragma unroll
  for (int j = 0; j < 4; ++j) r[j] = round_to_tf32(__uint_as_float(r[j]));
}

// S = Q K^T for the warp's rows and the tile's keys.
__device__ __forceinline__ void multiply_scores(Shared& shared, Fragments<Bc>& S, int first_row,
                                                int lane) {
#pragma unroll
  for (int k = 0; k < depth / rank; ++k) {
    unsigned a[Wr / step][4];
#pragma unroll
    for (int i = 0; i < Wr / step; ++i) {
      load_rounded(a[i], at(shared.Q, first_row + i * step + lane % 16, 2 * k + lane / 16));
    }
#pragma unroll
    for (int n = 0; n < Bc / step; ++n) {
      unsigned b[4];
      load_rounded(b, at(shared.K, n * step + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < Wr / step; ++i) {
        multiply_add_tf32(S[i][2 * n], a[i], b[0], b[1]);
        multiply_add_tf32(S[i][2 * n + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// O += P V: a product of S is an operand of this one, its columns 2c and 2c + 1 in the places of
// c and c + 4.
__device__ __forceinline__ void multiply_output(Shared& shared, const Fragments<Bc>& P,
                                                Fragments<width>& O, int lane) {
#pragma unroll
  for (int k = 0; k < Bc / rank; ++k) {
    unsigned a[Wr / step][4];
#pragma unroll
    for (int i = 0; i < Wr / step; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) a[i][j] = round_to_tf32(P[i][k][j % 2 * 2 + j / 2]);
    }
    const int key = k * rank + 2 * (lane % 4), col = lane / 4;
#pragma unroll
    for (int n = 0; n < width / 8; ++n) {
      const int chunk = 2 * n + col / in_chunk;
      const unsigned b0 = round_to_tf32(at(shared.V, key, chunk)[col % in_chunk]);
      const unsigned b1 = round_to_tf32(at(shared.V, key + 1, chunk)[col % in_chunk]);
#pragma unroll
      for (int i = 0; i < Wr / step; ++i) multiply_add_tf32(O[i][n], a[i], b0, b1);
    }
  }
}

// The same where V holds infinities or NaN: a masked key has weight 0, but 0 * NaN is NaN, so each
// row takes the keys that it sees alone.
__device__ void multiply_visible(Shared& shared, const Fragments<Bc>& P, Fragments<width>& O,
                                 const Rows& rows, int first_key, int lane) {
#pragma unroll
  for (int n = 0; n < Bc / 8; ++n) {
#pragma unroll 1
    for (int k = 0; k < 8; ++k) {
      const int key = n * 8 + k;
#pragma unroll
      for (int i = 0; i < 2 * (Wr / step); ++i) {
        const float (&p)[4] = P[i / 2][n];
        const float mine = k % 2 ? p[i % 2 * 2 + 1] : p[i % 2 * 2];
        const float weight = __shfl_sync(full_warp, mine, lane / 4 * 4 + k / 2);
        if (first_key + key >= rows.visible(i / 2, i % 2)) continue;
#pragma unroll
        for (int j = 0; j < width / 4; ++j) {
          const int col = j / 2 * 8 + 2 * (lane % 4);
          const scalar* v = at(shared.V, key, col / in_chunk) + col % in_chunk;
          O[i / 2][j / 2][i % 2 * 2 + j % 2] += weight * v[j % 2];
        }
      }
    }
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_tf32(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<scalar> O,
    Tensor<real> lse, int M, int N, int heads, int group, int diagonal, real scale) {
  Shared& shared = shared_memory<Shared>();
  const int tiles = cdiv(M, Br);
  const auto [tile, head, batch] = place(blockIdx.x, tiles, heads);
  const int first_row = (tiles - 1 - tile) * Br;  // the longest rows of a causal mask first
  const int lane = threadIdx.x % warp_size, own_row = threadIdx.x / warp_size * Wr;
  const scalar* queries = Q.row(batch, head, 0);
  const scalar* keys = K.row(batch, head / group, 0);
  const scalar* values = V.row(batch, head / group, 0);
  const bool q_aligned = is_aligned(Q), k_aligned = is_aligned(K), v_aligned = is_aligned(V);
  const float size = scale == 0 ? 1.0f : fabs(scale);

  copy_tile<d>(shared.Q, queries, Q.row_stride, q_aligned, first_row, M);
  copy_tile<d>(shared.K, keys, K.row_stride, k_aligned, 0, N);
  commit_copies();
  if (scale <= 0) {
    wait_for_copies<0>();
    __syncthreads();  // Q is there
    apply_sign(shared, scale);
  }
  Fragments<width> sums = {};
  Rows rows = {first_row + own_row + lane / 4, N, diagonal};
  for (int i = 0; i < 2 * (Wr / step); ++i) {
    rows.maximum[i / 2][i % 2] = -infinity;
    rows.sum[i / 2][i % 2] = 0;
  }

  const int seen_by_all = visible_keys(first_row, N, diagonal);
  const int seen_by_some = visible_keys(min(first_row + Br, M) - 1, N, diagonal);
  for (int first_key = 0; first_key < seen_by_some; first_key += Bc) {
    wait_for_copies<0>();
    __syncthreads();  // K is there, and V is no longer read
    copy_tile<dv>(shared.V, values, V.row_stride, v_aligned, first_key, N);
    commit_copies();
    Fragments<Bc> S = {};
    multiply_scores(shared, S, own_row, lane);
    wait_for_copies<0>();
    const bool masked = first_key + Bc > seen_by_all;
    // V is there, and K is no longer read.
    const bool strange = __syncthreads_or(causal && masked && is_strange(shared));
    if (first_key + Bc < seen_by_some) {
      copy_tile<d>(shared.K, keys, K.row_stride, k_aligned, first_key + Bc, N);
      commit_copies();
    }
    if (masked)
      softmax<true>(S, sums, rows, first_key, size * log2e, lane);
    else
      softmax<false>(S, sums, rows, first_key, size * log2e, lane);
    if (causal && strange)
      multiply_visible(shared, S, sums, rows, first_key, lane);
    else
      multiply_output(shared, S, sums, lane);
  }
  store_rows(sums, rows, O, lse, batch, head, M, size, lane);
}
