// rows: each block owns one tile of Q and loops over the tiles of K and V.
//
// The mirror image of `columns`: a block accumulates dQ of its rows on chip and writes it once. It
// adds each tile's parts of dK and dV to dK_sum and dV_sum in global memory with atomics: to two
// arrays instead of one, and with GQA more blocks add to each element than in `columns`.
//
//   Q, dO, dQ [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]
//   lse, delta [batch, heads, M]    dK_sum, dV_sum [batch, kv_heads, N, d | dv]
//   grid (cdiv(M, Br) * heads * batch)    block (threads)
//   the host sets: scalar, result, real, Br, Bc, d, dv, threads, shared_bytes and options
//   (score.cuh)
#include <attention/row_tile.cuh>
#include <attention/tile_index.cuh>
#include <backward/parts/pair_gradients.cuh>
#include <tile/shared.cuh>

struct Shared {
  real dQ[Br][d];
  PTile<Br, Bc> P, dS;
  real lse[Br];
  real delta[Br];
  scalar Q[Br][odd_width<scalar>(d)];
  scalar dO[Br][odd_width<scalar>(dv)];
  scalar K[Bc][odd_width<scalar>(d)];
  scalar V[Bc][odd_width<scalar>(dv)];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

extern "C" __global__ __launch_bounds__(threads) void rows(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> dO,
    Tensor<const real> lse, Tensor<const real> delta, Tensor<result> dQ, Tensor<real> dK_sum,
    Tensor<real> dV_sum, Sizes sizes, int heads, int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const Place at = place_of_rows<Br>(blockIdx.x, sizes, mods, heads);
  const int batch = at.batch, head = at.head, kv_head = head / group;
  const int first_row = at.tile * Br;
  const Extent extent = extent_of(sizes, mods, batch, head);
  if (!extent.has_tile_of_rows(first_row)) return;
  const int M = extent.M, N = extent.N;
  const Scorer<real> scorer = {scale, mods};
  const auto keys = row_tile<Br, Bc>(extent, first_row, head, batch);

  load_row_sums<threads>(shared.lse, shared.delta, lse, delta, batch, head, first_row, M);
  share_out<threads, Br * d, 4>([&](int i, int) { shared.dQ[i / d][i % d] = 0; });
  __syncthreads();  // lse is written
  load_rows<threads, d>(shared.Q, Q, shared.lse, batch, head, first_row);
  load_rows<threads, dv>(shared.dO, dO, shared.lse, batch, head, first_row);

  for (int first_key = keys.kv_begin; first_key < keys.kv_end;
       first_key = keys.after<Bc>(first_key)) {
    const TilePair<Br, Bc> pair = {extent, first_row, first_key};
    timeline::event(timeline::tile, first_key, first_row);
    __syncthreads();  // before this tile overwrites keys that a slower thread still reads
    load_tile<threads, d>(shared.K, K, batch, kv_head, first_key, N);
    load_tile<threads, dv>(shared.V, V, batch, kv_head, first_key, N);
    __syncthreads();  // K and V have arrived
    compute_P_and_dS<threads, d, dv>(shared, pair, scorer);
    __syncthreads();  // P and dS are written
    sum_over_keys<threads, d>(shared.dS, shared.K, pair,
                              [&](int row, int col, real sum) { shared.dQ[row][col] += sum; });
    sum_over_rows<threads, dv>(shared.P, shared.dO, pair, [&](int key, int col, real sum) {
      if (first_key + key >= N) return;
      atomicAdd(&dV_sum.row(batch, kv_head, first_key + key)[col], sum);
    });
    sum_over_rows<threads, d>(shared.dS, shared.Q, pair, [&](int key, int col, real sum) {
      if (first_key + key >= N) return;
      atomicAdd(&dK_sum.row(batch, kv_head, first_key + key)[col], sum);
    });
  }

  __syncthreads();  // the sums are written
  const timeline::Phase phase(timeline::epilogue);
  share_out<threads, Br * d, 4>([&](int i, int) {
    const int row = i / d, col = i % d;
    if (first_row + row >= M) return;
    const real sum = shared.lse[row] == -infinity ? real(0) : shared.dQ[row][col] * scale;
    dQ.row(batch, head, first_row + row)[col] = result(sum);
  });
}
