// hvp_rows: the derivative of dQ along a direction, over tiles of keys.
//
// `two_pass_rows` sums dQ = scale * dS K. If Q, K and V move, it moves by
//
//   dQ_dot = scale * (dS_dot K + dS K_dot)
//
// with dS_dot as in hvp_columns. The kernel writes dQ_dot to dQ.
//
//   Q, Q_dot, dO, dQ [batch, heads, M, d | dv]    K, K_dot, V, V_dot [batch, kv_heads, N, d | dv]
//   lse, lse_dot, delta, delta_dot [batch, heads, M]
//   grid (cdiv(M, Br) * heads * batch)    block (threads)
//   the host sets: scalar, result, real, Br, Bc, d, dv, threads, shared_bytes and options
//   (extent.cuh)
#include <attention/row_tile.cuh>
#include <attention/tile_index.cuh>
#include <backward/parts/gradient_tangents.cuh>
#include <tile/shared.cuh>

struct Shared {
  real dQ[Br][d];
  PTile<Br, Bc> P_dot, dS, dS_dot;
  real lse[Br], lse_dot[Br];
  real delta[Br], delta_dot[Br];
  scalar Q[Br][odd_width<scalar>(d)], Q_dot[Br][odd_width<scalar>(d)];
  scalar dO[Br][odd_width<scalar>(dv)];
  scalar K[Bc][odd_width<scalar>(d)], K_dot[Bc][odd_width<scalar>(d)];
  scalar V[Bc][odd_width<scalar>(dv)], V_dot[Bc][odd_width<scalar>(dv)];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(unit_slope, "the second derivative of the expressions is 0");

extern "C" __global__ __launch_bounds__(threads) void hvp_rows(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> dO,
    Tensor<const scalar> Q_dot, Tensor<const scalar> K_dot, Tensor<const scalar> V_dot,
    Tensor<const real> lse, Tensor<const real> lse_dot, Tensor<const real> delta,
    Tensor<const real> delta_dot, Tensor<result> dQ, Sizes sizes, int heads, int group, real scale,
    Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const Scorer<real> scorer = {scale, mods};
  const Place at = place_of_rows<Br>(blockIdx.x, sizes, mods, heads);
  const int batch = at.batch, head = at.head, kv_head = head / group;
  const int first_row = at.tile * Br;
  const Extent extent = extent_of(sizes, mods, batch, head);
  const int M = extent.M, N = extent.N;
  const auto keys = row_tile<Br, Bc>(extent, first_row, head, batch);

  load_row_sums<threads>(shared.lse, shared.delta, lse, delta, batch, head, first_row, M);
  load_row_sums<threads>(shared.lse_dot, shared.delta_dot, lse_dot, delta_dot, batch, head,
                         first_row, M);
  share_out<threads, Br * d, 4>([&](int i, int) { shared.dQ[i / d][i % d] = 0; });
  __syncthreads();  // lse is written
  load_rows<threads, d>(shared.Q, Q, shared.lse, batch, head, first_row);
  load_rows<threads, d>(shared.Q_dot, Q_dot, shared.lse, batch, head, first_row);
  load_rows<threads, dv>(shared.dO, dO, shared.lse, batch, head, first_row);
  const auto add_to_dQ = [&](int row, int col, real sum) { shared.dQ[row][col] += sum; };

  for (int first_key = keys.kv_begin; first_key < keys.kv_end;
       first_key = keys.after<Bc>(first_key)) {
    const TilePair<Br, Bc> pair = {extent, first_row, first_key};
    timeline::event(timeline::tile, first_key, first_row);
    __syncthreads();  // before this tile overwrites keys that a slower thread still reads
    load_tile<threads, d>(shared.K, K, batch, kv_head, first_key, N);
    load_tile<threads, d>(shared.K_dot, K_dot, batch, kv_head, first_key, N);
    load_tile<threads, dv>(shared.V, V, batch, kv_head, first_key, N);
    load_tile<threads, dv>(shared.V_dot, V_dot, batch, kv_head, first_key, N);
    __syncthreads();  // keys and values have arrived
    compute_tangents<threads, d, dv>(shared, pair, scorer);
    __syncthreads();  // dS and dS_dot are written
    sum_over_keys<threads, d>(shared.dS_dot, shared.K, pair, add_to_dQ);
    sum_over_keys<threads, d>(shared.dS, shared.K_dot, pair, add_to_dQ);
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
