// wgmma_two_pass_rows: dQ, of which a block keeps 128 rows and goes through tiles of keys.
//
// S = Q K^T and dP = dO V^T come out as fragments, dS of which is an operand of dQ += dS K where it
// lies: nothing is passed on through shared memory, or added in global memory.
//
//   Q, dO, dQ [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]
//   row_sums [batch, heads, cdiv(M, Br)]
//   grid (cdiv(M, 128) * heads * batch)    block (384)
//   the host sets: scalar, real, Br, Bk, stages, d, dv, causal, windowed, threads, shared_bytes
#include <ptx/opaque.cuh>
#include <backward/parts/gradient_warpgroups.cuh>
#include <attention/mask.cuh>
#include <backward/parts/recompute_gradients.cuh>
#include <tile/shared.cuh>

constexpr int own_rows = consumers * warpgroup_rows;

struct Shared {
  TmaTile<scalar, own_rows, d> Q;
  TmaTile<scalar, own_rows, dv> dO;
  TmaTile<scalar, Bk, d> K[stages];
  TmaTile<scalar, Bk, dv> V[stages];
  Barrier Q_full, dO_full, K_full[stages], V_full[stages], empty[stages];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Bk % step == 0, "tiles are made of whole products");
static_assert(threads == (consumers + 1) * warpgroup_size, "one warpgroup more, for the producer");

__device__ __forceinline__ void make_barriers(Shared& shared) {
  init_barrier(shared.Q_full, 1);
  init_barrier(shared.dO_full, 1);
  for (int i = 0; i < stages; ++i) {
    init_barrier(shared.K_full[i], 1);
    init_barrier(shared.V_full[i], 1);
    init_barrier(shared.empty[i], consumers);
  }
  fence_barrier_init();
}

// A block's rows of a head, and the keys that some of them see.
struct Work {
  int row, head, batch, start, end;
};

__device__ __forceinline__ Work find_work(int M, int N, int heads, int causal_offset,
                                          int window_offset) {
  const int tiles = cdiv(M, own_rows);
  const auto [tile, head, batch] = place(blockIdx.x, tiles, heads);
  const int row = (tiles - 1 - tile) * own_rows;  // the longest rows of a causal mask first
  return {row, head, batch, kv_begin(row, N, window_offset) / Bk * Bk,
          kv_end(min(row + own_rows, M) - 1, N, causal_offset)};
}

// What the producer's one thread does.
__device__ __forceinline__ void produce(Shared& shared, const Work& work, const TensorMap& Q,
                                        const TensorMap& K, const TensorMap& V, const TensorMap& dO,
                                        int kv_head) {
  if (work.start >= work.end) return;
  load_async(shared.Q, Q, shared.Q_full, work.row, work.head, work.batch);
  load_async(shared.dO, dO, shared.dO_full, work.row, work.head, work.batch);
  PipelineState<stages> turn;
#pragma unroll 1  // it has few registers
  for (int first_key = work.start; first_key < work.end; first_key += Bk, turn.advance()) {
    const int i = turn.stage;
    wait(shared.empty[i], turn.phase ^ 1);
    load_async(shared.K[i], K, shared.K_full[i], first_key, kv_head, work.batch);
    load_async(shared.V[i], V, shared.V_full[i], first_key, kv_head, work.batch);
  }
}

// The two rows that a thread has.
struct OwnRows {
  int first;  // of them
  float lse2[2], delta[2];
};

// S becomes P = 2^(S * scale2 - lse2).
__device__ __forceinline__ void weigh(Sums<Bk>& S, const OwnRows& rows, float scale2) {
#pragma unroll
  for (int i = 0; i < Bk / 2; ++i) S[i] = exp2f(S[i] * scale2 - rows.lse2[i / 2 % 2]);
}

// Sets the weights of pairs to 0 that do not count: a key may be so far ahead of a row.
__device__ __forceinline__ void hide(Sums<Bk>& P, const OwnRows& rows, int first_key, int N,
                                     int causal_offset, int window_offset) {
  const int key = first_key + 2 * (opaque(int(threadIdx.x)) % 4), ahead = key - opaque(rows.first);
#pragma unroll
  for (int i = 0; i < Bk / 2; ++i) {
    const int more = i / 4 * 8 + i % 2, here = ahead + more - i / 2 % 2 * 8;
    const bool seen = key + more < N && (!causal || here <= causal_offset) &&
                      (!windowed || here >= window_offset);
    if (!seen) P[i] = 0;
  }
}

// dP becomes dS = P * (dP - D), without the scale.
__device__ __forceinline__ void differentiate(const Sums<Bk>& P, Sums<Bk>& dP,
                                              const OwnRows& rows) {
#pragma unroll
  for (int i = 0; i < Bk / 2; ++i) dP[i] = P[i] * (dP[i] - rows.delta[i / 2 % 2]);
}

// What a warpgroup of consumers does.
__device__ __forceinline__ void consume(Shared& shared, const Work& work, int warpgroup,
                                        const OwnRows& rows, Sums<d_width>& dQ, int M, int N,
                                        int causal_offset, int window_offset, float scale2) {
  if (work.start >= work.end) return;
  const int seen_by_all = kv_end(work.row, N, causal_offset);
  const int hidden_from_some = kv_begin(min(work.row + own_rows, M) - 1, N, window_offset);
  PipelineState<stages> turn;
  wait(shared.Q_full, 0);
  wait(shared.dO_full, 0);
#pragma unroll 1
  for (int first_key = work.start; first_key < work.end; first_key += Bk, turn.advance()) {
    const int i = turn.stage;
    Sums<Bk> S, dP;
    Weights16<Bk> dS;
    wait(shared.K_full[i], turn.phase);
    begin_scores<d_width>(S, shared.Q, shared.K[i], warpgroup);
    wait(shared.V_full[i], turn.phase);
    begin_scores<dv_width>(dP, shared.dO, shared.V[i], warpgroup);
    wgmma_wait_group<1>(S);
    weigh(S, rows, scale2);
    if (first_key + Bk > seen_by_all || first_key < hidden_from_some)
      hide(S, rows, first_key, N, causal_offset, window_offset);
    wgmma_wait_group<0>(dP);
    differentiate(S, dP, rows);
    pack_weights(dP, dS);
    begin_sums(dQ, dS, shared.K[i]);
    wgmma_wait_group<0>(dQ);
    if (threadIdx.x % warpgroup_size == 0) arrive(shared.empty[i]);
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_two_pass_rows(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, const __grid_constant__ TensorMap dO_map,
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> dO,
    const RowSums* row_sums, Tensor<scalar> dQ, int M, int N, int heads, int group,
    int causal_offset, int window_offset, real scale) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) make_barriers(shared);
  __syncthreads();
  const Work work = find_work(M, N, heads, causal_offset, window_offset);
  const int kv_head = work.head / group, warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    give_to_consumers();
    if (threadIdx.x < warp_size && elect_one())
      produce(shared, work, Q_map, K_map, V_map, dO_map, kv_head);
    return;
  }
  take_from_producer();
  const int lane = threadIdx.x % warp_size;
  const int first = work.row + int(threadIdx.x) / warp_size * step - warpgroup_rows;
  OwnRows rows = {first + lane / 4};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = rows.first + half * 8;
    const RowSums* sums = row_sums + tile_of(work.batch, work.head, heads, row, M);
    rows.lse2[half] = row < M ? sums->lse2[row % Br] : infinity;
    rows.delta[half] = row < M ? sums->delta[row % Br] : 0;
  }
  Sums<d_width> sums = {};
  consume(shared, work, warpgroup, rows, sums, M, N, causal_offset, window_offset, scale * log2e);
  if (has_nonfinite(sums)) {
    recompute_rows<d_width>(Q, K, V, dO, dQ, row_sums, first, work.head, heads, kv_head, work.batch,
                            M, N, causal_offset, window_offset, scale, 0);
    return;
  }
  store_gradient<d>(sums, scale, first, dQ, work.batch, work.head, M, lane);
}
