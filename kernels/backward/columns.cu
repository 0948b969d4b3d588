// columns: each block owns one tile of K and V and loops over the tiles of Q.
//
// The forward pass does not store P: any tile of it is recomputed as exp(S - lse), without a row's
// maximum or sum. A block accumulates dK and dV of its keys on chip, over all rows and all query
// heads of the group, and writes them once. A tile of Q yields only a part of dQ, which is added to
// dQ_sum in global memory with atomics, since other blocks add to the same rows. The order of
// additions varies, and with it the last bits of dQ. (Dao, 2023, arXiv:2307.08691, algorithm 2)
//
//   Q, dO [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   lse, delta [batch, heads, M]    dQ_sum [batch, heads, M, d]
//   grid (max(cdiv(N, Bc), 1) * kv_heads * batch)    block (threads)
//   the host sets: scalar, result, real, Br, Bc, d, dv, threads, shared_bytes and options
//   (score.cuh)
#include <attention/tile_index.cuh>
#include <backward/parts/pair_gradients.cuh>
#include <backward/parts/row_range.cuh>
#include <tile/shared.cuh>

struct Shared {
  real dK[Bc][d];
  real dV[Bc][dv];
  PTile<Br, Bc> P, dS;
  real lse[Br];
  real delta[Br];
  scalar Q[Br][odd_width<scalar>(d)];
  scalar dO[Br][odd_width<scalar>(dv)];
  scalar K[Bc][odd_width<scalar>(d)];
  scalar V[Bc][odd_width<scalar>(dv)];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

extern "C" __global__ __launch_bounds__(threads) void columns(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> dO,
    Tensor<const real> lse, Tensor<const real> delta, Tensor<real> dQ_sum, Tensor<result> dK,
    Tensor<result> dV, Sizes sizes, int kv_heads, int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const Place at = place_of_keys<Bc>(blockIdx.x, sizes, mods, kv_heads);
  const int batch = at.batch, kv_head = at.head, first_key = at.tile * Bc;
  const Extent extent = extent_of(sizes, mods, batch, kv_head * group);
  if (!extent.has_tile_of_keys(first_key)) return;
  const int M = extent.M, N = extent.N;
  const Scorer<real> scorer = {scale, mods};
  const int first = row_begin(extent, first_key) / Br * Br, end = row_end(extent, first_key, Bc);

  load_tile<threads, d>(shared.K, K, batch, kv_head, first_key, N);
  load_tile<threads, dv>(shared.V, V, batch, kv_head, first_key, N);
  share_out<threads, Bc * d, 4>([&](int i, int) { shared.dK[i / d][i % d] = 0; });
  share_out<threads, Bc * dv, 4>([&](int i, int) { shared.dV[i / dv][i % dv] = 0; });

  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const Extent& own = extent_of_head(extent, head);
    const auto map = own.row_tiles(at.tile);
    for (int first_row = map.from<Br>(first); first_row < end;
         first_row = map.after<Br>(first_row)) {
      const TilePair<Br, Bc> pair = {own, first_row, first_key};
      timeline::event(timeline::tile, first_key, first_row);
      __syncthreads();  // before this tile overwrites rows that a slower thread still reads
      load_row_sums<threads>(shared.lse, shared.delta, lse, delta, batch, head, first_row, M);
      __syncthreads();  // lse is written
      load_rows<threads, d>(shared.Q, Q, shared.lse, batch, head, first_row);
      load_rows<threads, dv>(shared.dO, dO, shared.lse, batch, head, first_row);
      __syncthreads();  // Q and dO have arrived
      compute_P_and_dS<threads, d, dv>(shared, pair, scorer);
      __syncthreads();  // P and dS are written
      sum_over_rows<threads, dv>(shared.P, shared.dO, pair,
                                 [&](int key, int col, real sum) { shared.dV[key][col] += sum; });
      sum_over_rows<threads, d>(shared.dS, shared.Q, pair,
                                [&](int key, int col, real sum) { shared.dK[key][col] += sum; });
      sum_over_keys<threads, d>(shared.dS, shared.K, pair, [&](int row, int col, real sum) {
        if (shared.lse[row] == -infinity) return;
        atomicAdd(&dQ_sum.row(batch, head, first_row + row)[col], sum);
      });
    }
  }

  __syncthreads();  // the sums are written
  const timeline::Phase phase(timeline::epilogue);
  share_out<threads, Bc * d, 4>([&](int i, int) {
    const int key = i / d, col = i % d;
    if (first_key + key >= N) return;
    dK.row(batch, kv_head, first_key + key)[col] = result(shared.dK[key][col] * scale);
  });
  share_out<threads, Bc * dv, 4>([&](int i, int) {
    const int key = i / dv, col = i % dv;
    if (first_key + key >= N) return;
    dV.row(batch, kv_head, first_key + key)[col] = result(shared.dV[key][col]);
  });
}
