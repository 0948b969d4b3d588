// mma_swizzled: `mma_split_q` without bank conflicts.
//
// ldmatrix reads 16 bytes from each of 8 rows. Rows of 128 bytes or more begin in the same bank, so
// all eight came from the same four banks, one after the other. Here a row's chunks of 16 bytes
// trade places by an exclusive or with the row's number: eight rows, eight groups of banks, and no
// memory lost to padding.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   grid (cdiv(M, Br) * heads * batch)    block (32 * Br / Wr): each warp owns Wr rows
//   the host sets: scalar, real, Br, Bc, Wr, pack_gqa, d, dv, causal, windowed, threads,
//   shared_bytes
#include <attention/row_state.cuh>
#include <attention/mask.cuh>
#include <ptx/mma.cuh>
#include <tile/shared.cuh>
#include <tile/swizzle.cuh>
#include <tile/tensor.cuh>
#include <tile/block_copy.cuh>
#include <tile/warp.cuh>

constexpr int depth = cdiv(d, step) * step;   // of Q and K, filled up with zeros
constexpr int width = cdiv(dv, step) * step;  // of V and O
using OwnRows = Rows<Wr>;
constexpr int in_chunk = 8;  // elements in 16 bytes

struct Shared {
  scalar Q[Br][depth];
  scalar K[Bc][depth];
  scalar V[Bc][width];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(sizeof(scalar) == 2, "these tensor-core products take 16-bit numbers");
static_assert(threads == warp_size * Br / Wr, "each warp owns Wr rows");
static_assert(Wr % step == 0 && Bc % step == 0, "tiles are made of whole products");

struct alignas(16) Chunk {
  scalar x[in_chunk];
};

template <int height, int columns>
__device__ __forceinline__ scalar* at(scalar (&tile)[height][columns], int row, int chunk) {
  return &tile[row][swizzled<columns / in_chunk>(row, chunk) * in_chunk];
}

// Rows of a head with `cols` columns, 16 bytes at a time where they lie so; zeros outside it.
template <int cols, int height, int columns>
__device__ __forceinline__ void load_tile(scalar (&tile)[height][columns], const scalar* head,
                                          long long stride, bool aligned, int first_row, int rows) {
  share_out_rows<height, columns / in_chunk>([&](int row, int chunk, int) {
    const int col = chunk * in_chunk;
    const scalar* from = head + (first_row + row) * stride + col;
    Chunk loaded = {};
    if (first_row + row < rows) {
      if (aligned && col + in_chunk <= cols) {
        loaded = *reinterpret_cast<const Chunk*>(from);
      } else {
        for (int j = 0; j < in_chunk && col + j < cols; ++j) loaded.x[j] = from[j];
      }
    }
    *reinterpret_cast<Chunk*>(at(tile, row, chunk)) = loaded;
  });
}

// Takes the sign of the scale, or its being 0, into Q, which leaves a positive scale.
__device__ void apply_sign(Shared& shared, float scale) {
  share_out<Br * depth, 1>([&](int i, int) {
    scalar& q = shared.Q[i / depth][i % depth];
    q = scalar(float(q) * (scale < 0 ? -1.0f : 0.0f));
  });
}

// Whether one of the chunks of V that this thread has loaded holds an infinity or NaN.
__device__ bool has_nonfinite(Shared& shared) {
  bool nonfinite = false;
  share_out_rows<Bc, width / in_chunk>([&](int row, int chunk, int) {
    const scalar* x = at(shared.V, row, chunk);
    for (int j = 0; j < in_chunk; ++j) nonfinite |= !(fabs(float(x[j])) < infinity);
  });
  return nonfinite;
}

// S = Q K^T for the warp's rows and the tile's keys.
__device__ __forceinline__ void multiply_scores(Shared& shared, Fragments<Wr, Bc>& S, int first_row,
                                                int lane) {
#pragma unroll
  for (int k = 0; k < depth / step; ++k) {
    unsigned a[Wr / step][4];
#pragma unroll
    for (int i = 0; i < Wr / step; ++i) {
      ldmatrix(a[i], at(shared.Q, first_row + i * step + lane % 16, 2 * k + lane / 16));
    }
#pragma unroll
    for (int n = 0; n < Bc / step; ++n) {
      unsigned b[4];
      ldmatrix(b, at(shared.K, n * step + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < Wr / step; ++i) {
        multiply_add<scalar>(S[i][2 * n], a[i], b[0], b[1]);
        multiply_add<scalar>(S[i][2 * n + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// O += P V: two products of S side by side are an operand of this one.
__device__ __forceinline__ void multiply_output(Shared& shared, const Fragments<Wr, Bc>& P,
                                                Fragments<Wr, width>& O, int lane) {
#pragma unroll
  for (int k = 0; k < Bc / step; ++k) {
    unsigned a[Wr / step][4];
#pragma unroll
    for (int i = 0; i < Wr / step; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float (&p)[4] = P[i][2 * k + j / 2];
        a[i][j] = pack<scalar>(p[j % 2 * 2], p[j % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < width / step; ++n) {
      unsigned b[4];
      ldmatrix_trans(b, at(shared.V, k * step + lane % 16, 2 * n + lane / 16));
#pragma unroll
      for (int i = 0; i < Wr / step; ++i) {
        multiply_add<scalar>(O[i][2 * n], a[i], b[0], b[1]);
        multiply_add<scalar>(O[i][2 * n + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// The same where V holds infinities or NaN: a masked key has weight 0, but 0 * NaN is NaN, so each
// row takes the keys that it sees alone.
__device__ void multiply_visible(Shared& shared, const Fragments<Wr, Bc>& P,
                                 Fragments<Wr, width>& O, const OwnRows& rows, int first_key,
                                 int lane) {
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
        if (!rows.sees(i / 2, i % 2, first_key + key)) continue;
#pragma unroll
        for (int j = 0; j < width / 4; ++j) {
          const int col = j / 2 * 8 + 2 * (lane % 4);
          const scalar* v = at(shared.V, key, j / 2) + col % in_chunk;
          O[i / 2][j / 2][i % 2 * 2 + j % 2] += weight * float(v[j % 2]);
        }
      }
    }
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_swizzled(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<scalar> O,
    Tensor<real> lse, int M, int N, int heads, int group, int causal_offset, int window_offset,
    real scale) {
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

  load_tile<d>(shared.Q, queries, Q.row_stride, q_aligned, first_row, M);
  if (scale <= 0) {
    __syncthreads();  // Q is there
    apply_sign(shared, scale);
  }
  Fragments<Wr, width> sums = {};
  OwnRows rows(first_row + own_row + lane / 4, Extent{M, N, causal_offset, window_offset},
               log2e * size);

  const int seen_by_all = kv_end(first_row, N, causal_offset);
  const int last_row = min(first_row + Br, M) - 1;
  const int seen_by_some = kv_end(last_row, N, causal_offset);
  const int hidden_from_some = kv_begin(last_row, N, window_offset);
  const int start = kv_begin(first_row, N, window_offset) / Bc * Bc;  // the first tile that is seen
  for (int first_key = start; first_key < seen_by_some; first_key += Bc) {
    __syncthreads();  // before keys that a slower warp still reads are overwritten
    load_tile<d>(shared.K, keys, K.row_stride, k_aligned, first_key, N);
    load_tile<dv>(shared.V, values, V.row_stride, v_aligned, first_key, N);
    const bool masked = first_key + Bc > seen_by_all || first_key < hidden_from_some;
    const bool nonfinite =
        __syncthreads_or(has_mask && masked && has_nonfinite(shared));  // they are there
    Fragments<Wr, Bc> S = {};
    multiply_scores(shared, S, own_row, lane);
    if (masked)
      softmax<true>(S, sums, rows, first_key, lane);
    else
      softmax<false>(S, sums, rows, first_key, lane);
    if (has_mask && nonfinite)
      multiply_visible(shared, S, sums, rows, first_key, lane);
    else
      multiply_output(shared, S, sums, lane);
  }
  finish_rows(sums, rows, lse, batch, head, lane);
  store_rows<dv>(sums, rows, O, batch, head, lane);
}
