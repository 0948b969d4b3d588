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
  Boxes<scalar, own_rows, d> Q;
  Boxes<scalar, own_rows, dv> dO;
  Boxes<scalar, Bk, d> K[stages];
  Boxes<scalar, Bk, dv> V[stages];
  Barrier Q_full, dO_full, K_full[stages], V_full[stages], empty[stages];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Bk % step == 0, "tiles are made of whole products");
static_assert(threads == (consumers + 1) * warpgroup_size, "one warpgroup more, for the producer");

__device__ __forceinline__ void make_barriers(Shared& shared) {
  make_barrier(shared.Q_full, 1);
  make_barrier(shared.dO_full, 1);
  for (int i = 0; i < stages; ++i) {
    make_barrier(shared.K_full[i], 1);
    make_barrier(shared.V_full[i], 1);
    make_barrier(shared.empty[i], consumers);
  }
  publish_barriers();
}

// A block's rows of a head, and the keys that some of them see.
struct Work {
  int row, head, batch, start, end;
};

__device__ __forceinline__ Work find_work(int M, int N, int heads, int diagonal, int lower) {
  const int tiles = cdiv(M, own_rows);
  const auto [tile, head, batch] = place(blockIdx.x, tiles, heads);
  const int row = (tiles - 1 - tile) * own_rows;  // the longest rows of a causal mask first
  return {row, head, batch, hidden_keys(row, N, lower) / Bk * Bk,
          visible_keys(min(row + own_rows, M) - 1, N, diagonal)};
}

// What the producer's one thread does.
__device__ __forceinline__ void produce(Shared& shared, const Work& work, const TensorMap& Q,
                                        const TensorMap& K, const TensorMap& V, const TensorMap& dO,
                                        int kv_head) {
  if (work.start >= work.end) return;
  load_boxes(shared.Q, Q, shared.Q_full, work.row, work.head, work.batch);
  load_boxes(shared.dO, dO, shared.dO_full, work.row, work.head, work.batch);
  Turn<stages> turn;
#pragma unroll 1  // it has few registers
  for (int first_key = work.start; first_key < work.end; first_key += Bk, turn.advance()) {
    const int i = turn.stage;
    wait(shared.empty[i], turn.phase ^ 1);
    load_boxes(shared.K[i], K, shared.K_full[i], first_key, kv_head, work.batch);
    load_boxes(shared.V[i], V, shared.V_full[i], first_key, kv_head, work.batch);
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
                                     int diagonal, int lower) {
  const int key = first_key + 2 * (fresh(int(threadIdx.x)) % 4), ahead = key - fresh(rows.first);
#pragma unroll
  for (int i = 0; i < Bk / 2; ++i) {
    const int more = i / 4 * 8 + i % 2, here = ahead + more - i / 2 % 2 * 8;
    const bool seen =
        key + more < N && (!causal || here <= diagonal) && (!windowed || here >= lower);
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
                                        int diagonal, int lower, float scale2) {
  if (work.start >= work.end) return;
  const int seen_by_all = visible_keys(work.row, N, diagonal);
  const int hidden_from_some = hidden_keys(min(work.row + own_rows, M) - 1, N, lower);
  Turn<stages> turn;
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
    wait_for_products<1>(S);
    weigh(S, rows, scale2);
    if (first_key + Bk > seen_by_all || first_key < hidden_from_some)
      hide(S, rows, first_key, N, diagonal, lower);
    wait_for_products<0>(dP);
    differentiate(S, dP, rows);
    pack_weights(dP, dS);
    begin_sums(dQ, dS, shared.K[i]);
    wait_for_products<0>(dQ);
    if (threadIdx.x % warpgroup_size == 0) arrive(shared.empty[i]);
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_two_pass_rows(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, const __grid_constant__ TensorMap dO_map,
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> dO,
    const RowSums* row_sums, Tensor<scalar> dQ, int M, int N, int heads, int group, int diagonal,
    int lower, real scale) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) make_barriers(shared);
  __syncthreads();
  const Work work = find_work(M, N, heads, diagonal, lower);
  const int kv_head = work.head / group, warpgroup = uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    give_to_consumers();
    if (threadIdx.x < warp_size && is_elected())
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
  consume(shared, work, warpgroup, rows, sums, M, N, diagonal, lower, scale * log2e);
  if (is_strange(sums)) {
    recompute_rows<d_width>(Q, K, V, dO, dQ, row_sums, first, work.head, heads, kv_head, work.batch,
                            M, N, diagonal, lower, scale, 0);
    return;
  }
  store_gradient<d>(sums, scale, first, dQ, work.batch, work.head, M, lane);
}
