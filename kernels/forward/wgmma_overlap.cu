// wgmma_overlap: `wgmma`, whose tensor cores work while exponentials are computed.
//
// A warpgroup begins the scores of the next tile together with O += P V of this one, and computes
// weights while the second goes on. Warpgroups begin in turns, so that one computes weights while
// the tensor cores are another's. A row's maximum is raised only where it is exceeded by more than
// `slack`: O is then hardly ever rescaled.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   grid (cdiv(M, Br) * heads * batch)    block (128 + 2 * Br)
//   the host sets: scalar, operand, real, Br, Bc, Wr, stages, pack_gqa, d, dv, causal, windowed,
//   threads, shared_bytes
#include <forward/parts/consumers.cuh>
#include <attention/mask.cuh>
#include <forward/parts/row_tile.cuh>
#include <attention/nonfinite.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <forward/parts/ping_pong.cuh>

struct Shared {
  Queries Q;
  Keys K[stages];
  Values V[stages];
  Barrier Q_full, K_full[stages], V_full[stages], K_empty[stages], V_empty[stages];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

__device__ __forceinline__ void make_barriers(Shared& shared) {
  init_barrier(shared.Q_full, 1);
  for (int i = 0; i < stages; ++i) {
    init_barrier(shared.K_full[i], 1);
    init_barrier(shared.V_full[i], 1);
    init_barrier(shared.K_empty[i], consumers);
    init_barrier(shared.V_empty[i], consumers);
  }
  fence_barrier_init();
}

// What the producer's one thread does.
__device__ __forceinline__ void produce(Shared& shared, const Work& work, const TensorMap& Q,
                                        const TensorMap& K, const TensorMap& V, int kv_head) {
  load_async(shared.Q, Q, shared.Q_full, work.row, work.head, work.batch);
  PipelineState<stages> turn;
#pragma unroll 1  // it has few registers
  for (int first_key = work.start; first_key < work.end; first_key += Bc, turn.advance()) {
    const int i = turn.stage;
    wait(shared.K_empty[i], turn.phase ^ 1);
    load_async(shared.K[i], K, shared.K_full[i], first_key, kv_head, work.batch);
    wait(shared.V_empty[i], turn.phase ^ 1);
    load_async(shared.V[i], V, shared.V_full[i], first_key, kv_head, work.batch);
  }
}

// S becomes P for a tile that some row does not see all of, if it is `masked`. Returns whether O
// has to be multiplied by the factors.
__device__ __forceinline__ bool weigh(Fragments<step, Bc>& S, Rows<step>& rows, int first_key,
                                      int lane, bool masked, float (&factor)[1][2]) {
  const bool risen = masked ? raise_maxima<true, slack>(S, rows, first_key, lane, factor)
                            : raise_maxima<false, slack>(S, rows, first_key, lane, factor);
  rows.scale(factor);
  exponentiate(S, rows);
  return risen;
}

// What a warpgroup of consumers does. While it computes the weights of a tile, the tensor cores
// work on O += P V of the tile before, and for other warpgroups.
__device__ __forceinline__ void consume(Shared& shared, const Work& work, int warpgroup,
                                        Rows<step>& rows, Fragments<step, width>& O, int M) {
  if (work.start >= work.end) return;
  const int lane = threadIdx.x % warp_size;
  const bool leads = threadIdx.x % warpgroup_size == 0;
  const int seen_by_all = kv_end(work.row, rows.extent.N, rows.extent.causal_offset);
  const int hidden_from_some =
      kv_begin(min(work.row + Br, M) - 1, rows.extent.N, rows.extent.window_offset);
  const auto masked = [&](int first_key) {
    return first_key + Bc > seen_by_all || first_key < hidden_from_some;
  };
  Fragments<step, Bc> S;
  Weights P;
  PipelineState<stages> keys, values;
  float factor[1][2];
  wait(shared.K_full[0], 0);
  begin_scores(shared.Q, shared.K[0], S, warpgroup * warpgroup_rows);
  wgmma_wait_group<0>(flat(S));
  if (leads) arrive(shared.K_empty[0]);
  if (warpgroup == 0) pass_turn(consumers - 1);
  weigh(S, rows, work.start, lane, masked(work.start), factor);
  pack_weights(S, P);
  for (int first_key = work.start + Bc; first_key < work.end; first_key += Bc) {
    keys.advance();
    wait(shared.K_full[keys.stage], keys.phase);
    await_turn(warpgroup);
    begin_scores(shared.Q, shared.K[keys.stage], S, warpgroup * warpgroup_rows);
    wait(shared.V_full[values.stage], values.phase);
    begin_output(shared.V[values.stage], P, O, true);
    pass_turn(warpgroup);
    wgmma_wait_group<1>(flat(S));
    if (leads) arrive(shared.K_empty[keys.stage]);
    const bool risen = weigh(S, rows, first_key, lane, masked(first_key), factor);
    wgmma_wait_group<0>(flat(O));
    if (leads) arrive(shared.V_empty[values.stage]);
    pack_weights(S, P);
    if (risen) scale_rows(O, factor);
    values = keys;
  }
  wait(shared.V_full[values.stage], values.phase);
  begin_output(shared.V[values.stage], P, O, true);
  wgmma_wait_group<0>(flat(O));
}

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_overlap(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, Tensor<const operand> Q, Tensor<const operand> K,
    Tensor<const operand> V, Tensor<scalar> O, Tensor<real> lse, int M, int N, int heads, int group,
    int causal_offset, int window_offset, real scale) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) make_barriers(shared);
  __syncthreads();
  const Work work = find_work<Br, Bc>(blockIdx.x, M, N, heads, causal_offset, window_offset);
  const int kv_head = work.head / group, warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    give_to_consumers();
    if (threadIdx.x < warp_size && elect_one()) produce(shared, work, Q_map, K_map, V_map, kv_head);
    return;
  }
  take_from_producer();
  const int lane = threadIdx.x % warp_size;
  const int own_row = threadIdx.x / warp_size * step - warpgroup_rows;
  Rows<step> rows(work.row + own_row + lane / 4, Extent{M, N, causal_offset, window_offset},
                  log2e * (scale == 0 ? 1.0f : fabs(scale)));
  Fragments<step, width> sums = {};
  wait(shared.Q_full, 0);
  if (scale <= 0) apply_sign(shared.Q, warpgroup * warpgroup_rows, scale, warpgroup);
  consume(shared, work, warpgroup, rows, sums, M);
  finish_rows(sums, rows, lse, work.batch, work.head, lane);
  if (has_mask && has_nonfinite(sums))
    recompute_rows(Q, K, V, O, rows, work.batch, work.head, kv_head, M, scale);
  else
    store_pieces(sums, rows, O, work.batch, work.head, M, lane);
}
