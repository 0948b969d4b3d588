// wgmma: the tensor cores of Hopper, fed by a warp that does nothing else.
//
// One thread of a producer warp asks the tensor memory accelerator for Q, and for tiles of K and V
// in turn, up to `stages` ahead. Each warpgroup of consumers owns 64 rows and multiplies them as a
// whole, operands straight from shared memory; only P is in registers. Barriers in shared memory
// say which buffers are full, and which were read and may be filled again: no barrier is for all
// threads. The fragments are those of `mma_pipelined`, and so is what is done with them.
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

// What a warpgroup of consumers does: for each tile S = Q K^T, P = softmax(S), O += P V.
__device__ __forceinline__ void consume(Shared& shared, const Work& work, int warpgroup,
                                        Rows<step>& rows, Fragments<step, width>& O, int M) {
  const int lane = threadIdx.x % warp_size;
  const bool leads = threadIdx.x % warpgroup_size == 0;
  const int seen_by_all = kv_end(work.row, rows.extent.N, rows.extent.causal_offset);
  const int hidden_from_some =
      kv_begin(min(work.row + Br, M) - 1, rows.extent.N, rows.extent.window_offset);
  PipelineState<stages> turn;
  for (int first_key = work.start; first_key < work.end; first_key += Bc, turn.advance()) {
    const int i = turn.stage;
    Fragments<step, Bc> S;
    Weights P;
    wait(shared.K_full[i], turn.phase);
    begin_scores(shared.Q, shared.K[i], S, warpgroup * warpgroup_rows);
    wgmma_wait_group<0>(flat(S));
    if (leads) arrive(shared.K_empty[i]);
    if (first_key + Bc <= seen_by_all && first_key >= hidden_from_some)
      softmax<false>(S, O, rows, first_key, lane);
    else
      softmax<true>(S, O, rows, first_key, lane);
    pack_weights(S, P);
    wait(shared.V_full[i], turn.phase);
    begin_output(shared.V[i], P, O, true);
    wgmma_wait_group<0>(flat(O));
    if (leads) arrive(shared.V_empty[i]);
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma(
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
