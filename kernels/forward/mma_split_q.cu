// mma_split_q: the loops of `fa2` on tensor cores, with S, P and O in registers.
//
// A warp owns Wr rows of the tile in both products, so its softmax needs no data from other warps:
// two shuffles reduce over the four lanes of a row. The register layout of mma.sync is documented
// (mma.cuh), so S becomes P, and P an operand of the second product, in the same registers. Shared
// memory holds only Q, K and V. (Dao, 2023, arXiv:2307.08691, section 3.3)
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   grid (cdiv(M, Br) * heads * batch)    block (32 * Br / Wr): each warp owns Wr rows
//   the host sets: scalar, result, real, Br, Bc, Wr, d, dv, threads, shared_bytes and options
//   (extent.cuh)
#include <attention/finish_rows.cuh>
#include <attention/nonfinite.cuh>
#include <attention/row_softmax.cuh>
#include <attention/row_tile.cuh>
#include <attention/score.cuh>
#include <attention/store_rows.cuh>
#include <attention/tile_index.cuh>
#include <attention/tile_mask.cuh>
#include <ptx/mma.cuh>
#include <tile/share_out_rows.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>
#include <timeline.cuh>

constexpr int depth = cdiv(d, step) * step;   // columns of Q and K, padded with zeros
constexpr int width = cdiv(dv, step) * step;  // columns of V and O
constexpr int in_chunk = 8;                   // elements per 16-byte chunk

struct Shared {
  scalar Q[Br][depth];
  scalar K[Bc][depth];
  scalar V[Bc][width];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(sizeof(scalar) == 2, "these tensor-core products take 16-bit numbers");
static_assert(threads == warp_size * Br / Wr, "each warp owns Wr rows");
static_assert(Wr % step == 0 && Bc % step == 0, "tiles are multiples of the MMA shape");

template <int height, int columns>
__device__ __forceinline__ scalar* at(scalar (&tile)[height][columns], int row, int chunk) {
  return &tile[row][chunk * in_chunk];
}

// Copies rows of a head with `cols` columns, in chunks of 16 bytes if they are aligned. Writes
// zeros past the last row and column.
template <int cols, int height, int columns>
__device__ __forceinline__ void load_chunks(scalar (&tile)[height][columns],
                                            Tensor<const scalar> tensor, int batch, int head,
                                            int first_row, int rows) {
  const timeline::Phase phase(timeline::loads, size_t(tensor.data) / 16);
  const bool aligned = is_aligned(tensor);
  share_out_rows<threads, height, columns / in_chunk>([&](int row, int chunk, int) {
    const int col = chunk * in_chunk;
    const int count = first_row + row < rows ? min(in_chunk, cols - col) : 0;
    const scalar* from = tensor.row(batch, head, first_row + row) + col;
    uint4 loaded = {};
    if (aligned && count == in_chunk)
      loaded = *reinterpret_cast<const uint4*>(from);
    else
      for (int j = 0; j < count; ++j) reinterpret_cast<scalar*>(&loaded)[j] = from[j];
    *reinterpret_cast<uint4*>(at(tile, row, chunk)) = loaded;
  });
}

// D += A B for 16 columns of A. load(b, j) loads B's fragments for columns 16 j to 16 j + 15.
template <int m, int n, class Load>
__device__ __forceinline__ void multiply_step(float (&D)[m][n][4], const unsigned (&a)[m][4],
                                              Load load) {
#pragma unroll
  for (int j = 0; j < n / 2; ++j) {
    unsigned b[4];
    load(b, j);
#pragma unroll
    for (int i = 0; i < 2 * m; ++i)  // every fragment of A with every fragment of B
      multiply_add<scalar>(D[i / 2][2 * j + i % 2], a[i / 2], b[i % 2 * 2], b[i % 2 * 2 + 1]);
  }
}

// S = Q K^T for the warp's rows and the tile's keys.
__device__ __forceinline__ void multiply_scores(scalar (&Q)[Br][depth], scalar (&K)[Bc][depth],
                                                Fragments<Wr, Bc>& S, int first_row, int lane) {
  const timeline::Phase phase(timeline::products);
#pragma unroll
  for (int k = 0; k < depth / step; ++k) {
    unsigned a[Wr / step][4];  // rows 0-7, rows 8-15; then both for the next 8 columns
#pragma unroll
    for (int i = 0; i < Wr / step; ++i)
      ldmatrix(a[i], at(Q, first_row + i * step + lane % 16, 2 * k + lane / 16));
    multiply_step(S, a, [&](unsigned (&b)[4], int j) {  // 8 keys x 16 columns, then 8 more keys
      ldmatrix(b, at(K, j * step + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
    });
  }
}

// O += P V. Two adjacent accumulator fragments of P form one operand of this product.
__device__ __forceinline__ void multiply_output(scalar (&V)[Bc][width], const Fragments<Wr, Bc>& P,
                                                Fragments<Wr, width>& O, int lane) {
  const timeline::Phase phase(timeline::products);
#pragma unroll
  for (int k = 0; k < Bc / step; ++k) {
    unsigned a[Wr / step][4];
#pragma unroll
    for (int i = 0; i < Wr / step * 4; ++i) {
      const float (&p)[4] = P[i / 4][2 * k + i % 4 / 2];  // keys 0-7, then keys 8-15
      a[i / 4][i % 4] = pack<scalar>(p[i % 2 * 2], p[i % 2 * 2 + 1]);
    }
    multiply_step(O, a, [&](unsigned (&b)[4], int j) {  // 16 keys x 8 columns, then 8 more columns
      ldmatrix_trans(b, at(V, k * step + lane % 16, 2 * j + lane / 16));
    });
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_split_q(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<result> O,
    Tensor<real> lse, Sizes sizes, int heads, int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const auto [index, head, batch] = place_of_rows<Br>(blockIdx.x, sizes, mods, heads);
  const int lane = threadIdx.x % warp_size, own_row = threadIdx.x / warp_size * Wr;
  const int kv_head = head / group;
  const Extent extent = extent_of(sizes, mods, batch, head);
  const Scorer<real> scorer = {scale, mods};
  // Reversed order: under a causal mask the last rows have the most keys and should start first.
  const int row = (cdiv(extent.M, Br) - 1 - index) * Br;
  if (!extent.has_tile_of_rows(row)) return;
  const RowTile tile = row_tile<Br, Bc>(extent, row, head, batch);

  load_chunks<d>(shared.Q, Q, batch, head, tile.row, extent.M);
  Fragments<Wr, width> sums = {};
  Rows<Wr> rows(tile.row + own_row + lane / 4, extent, scorer.scale2());
  for (int first_key = tile.kv_begin; first_key < tile.kv_end;
       first_key = tile.after<Bc>(first_key)) {
    timeline::event(timeline::tile, first_key, tile.row);
    __syncthreads();  // before this tile overwrites keys that a slower warp still reads
    load_chunks<d>(shared.K, K, batch, kv_head, first_key, extent.N);
    load_chunks<dv>(shared.V, V, batch, kv_head, first_key, extent.N);
    __syncthreads();  // Q, K and V have arrived
    Fragments<Wr, Bc> S = {};
    multiply_scores(shared.Q, shared.K, S, own_row, lane);
    scorer.apply(S, rows, first_key, tile.is_full<Bc>(first_key));
    if (is_masked(extent, tile.row, Br, first_key, Bc))
      rescale<true>(S, sums, rows, first_key, lane);  // also masks S
    else
      rescale<false>(S, sums, rows, first_key, lane);
    exponentiate(S, rows, first_key);
    multiply_output(shared.V, S, sums, lane);
  }
  if (needs_repair(sums, rows)) {
    repair_rows<d, dv>(Q, K, V, O, lse, rows, batch, head, kv_head, scorer);
    return;
  }
  finish_rows(sums, rows, lse, batch, head, lane);
  store_rows<dv>(sums, rows, O, batch, head, lane);
}
