// hvp_columns: the derivatives of dK and dV along a direction, over tiles of rows.
//
// `two_pass_columns` sums dK = scale * dS^T Q and dV = P^T dO. If Q, K and V move, these move by
//
//   dK_dot = scale * (dS_dot^T Q + dS^T Q_dot)    dV_dot = P_dot^T dO
//
// where P_dot = P * (S_dot - lse_dot) and dS_dot = P_dot * (dP - D) + P * (dP_dot - D_dot). As D is
// rowsum(dO * O), D_dot is rowsum(dO * O_dot). The kernel writes dK_dot and dV_dot to dK and dV.
//
//   Q, Q_dot, dO [batch, heads, M, d | dv]    K, K_dot, V, V_dot, dK, dV [batch, kv_heads, N, d |
//   dv] lse, lse_dot, delta, delta_dot [batch, heads, M] grid (max(cdiv(N, Bc), 1) * kv_heads *
//   batch)    block (threads) the host sets: scalar, result, real, Br, Bc, d, dv, threads,
//   shared_bytes and options (extent.cuh)
#include <attention/tile_index.cuh>
#include <backward/parts/gradient_tangents.cuh>
#include <backward/parts/row_range.cuh>
#include <tile/shared.cuh>

struct Shared {
  real dK[Bc][d];
  real dV[Bc][dv];
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

extern "C" __global__ __launch_bounds__(threads) void hvp_columns(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> dO,
    Tensor<const scalar> Q_dot, Tensor<const scalar> K_dot, Tensor<const scalar> V_dot,
    Tensor<const real> lse, Tensor<const real> lse_dot, Tensor<const real> delta,
    Tensor<const real> delta_dot, Tensor<result> dK, Tensor<result> dV, Sizes sizes, int kv_heads,
    int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const Scorer<real> scorer = {scale, mods};
  const Place at = place_of_keys<Bc>(blockIdx.x, sizes, mods, kv_heads);
  const int batch = at.batch, kv_head = at.head, first_key = at.tile * Bc;
  const Extent extent = extent_of(sizes, mods, batch, kv_head * group);
  const int M = extent.M, N = extent.N;
  const int first = row_begin(extent, first_key) / Br * Br, end = row_end(extent, first_key, Bc);

  load_tile<threads, d>(shared.K, K, batch, kv_head, first_key, N);
  load_tile<threads, d>(shared.K_dot, K_dot, batch, kv_head, first_key, N);
  load_tile<threads, dv>(shared.V, V, batch, kv_head, first_key, N);
  load_tile<threads, dv>(shared.V_dot, V_dot, batch, kv_head, first_key, N);
  share_out<threads, Bc * d, 4>([&](int i, int) { shared.dK[i / d][i % d] = 0; });
  share_out<threads, Bc * dv, 4>([&](int i, int) { shared.dV[i / dv][i % dv] = 0; });
  const auto add_to_dK = [&](int key, int col, real sum) { shared.dK[key][col] += sum; };

  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    for (int first_row = first; first_row < end; first_row += Br) {
      const TilePair<Br, Bc> pair = {extent_of_head(extent, head), first_row, first_key};
      timeline::event(timeline::tile, first_key, first_row);
      __syncthreads();  // before this tile overwrites rows that a slower thread still reads
      load_row_sums<threads>(shared.lse, shared.delta, lse, delta, batch, head, first_row, M);
      load_row_sums<threads>(shared.lse_dot, shared.delta_dot, lse_dot, delta_dot, batch, head,
                             first_row, M);
      __syncthreads();  // lse is written
      load_rows<threads, d>(shared.Q, Q, shared.lse, batch, head, first_row);
      load_rows<threads, d>(shared.Q_dot, Q_dot, shared.lse, batch, head, first_row);
      load_rows<threads, dv>(shared.dO, dO, shared.lse, batch, head, first_row);
      __syncthreads();  // Q, Q_dot and dO have arrived
      compute_tangents<threads, d, dv>(shared, pair, scorer);
      __syncthreads();  // P_dot, dS and dS_dot are written
      sum_over_rows<threads, dv>(shared.P_dot, shared.dO, pair,
                                 [&](int key, int col, real sum) { shared.dV[key][col] += sum; });
      sum_over_rows<threads, d>(shared.dS_dot, shared.Q, pair, add_to_dK);
      sum_over_rows<threads, d>(shared.dS, shared.Q_dot, pair, add_to_dK);
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
