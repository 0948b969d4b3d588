// wgmma_columns: `columns` on Hopper's tensor cores. Warpgroups own 64 keys each, one warp loads
// for all with TMA, and others add to dQ, which nobody else waits for.
//
// Scores are computed transposed, S^T = K Q^T: in that form P^T and dS^T are operands in registers
// of dV += P^T dO and dK += dS^T Q, and stay where they come out. Only dS for dQ = dS K, a sum over
// the keys of both warpgroups, goes through shared memory. dQ leaves as the registers hold it: the
// copy engine adds it to sums in memory, of which `finish_rows` knows the order.
//
//   Q, dO [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   row_sums [batch, heads, cdiv(M, Br)]    dQ_sum [batch, heads, cdiv(M, Br), parts]
//   grid (max(cdiv(N, Bc), 1) * kv_heads * batch)    block (384)
//   the host sets: scalar, real, Br, Bc, stages, dS_stages, d, dv, causal, windowed, threads,
//   shared_bytes
#include <boxes.cuh>
#include <fresh.cuh>
#include <gradients.cuh>
#include <named_barrier.cuh>
#include <quads.cuh>
#include <recompute_gradients.cuh>
#include <row_sums.cuh>
#include <shared.cuh>
#include <warpgroup.cuh>
#include <wgmma.cuh>

struct Shared {
  Boxes<scalar, Bc, d> K;
  Boxes<scalar, Bc, dv> V;
  Boxes<scalar, Br, d> Q[stages];
  Boxes<scalar, Br, dv> dO[stages];
  Boxes<scalar, Br, Bc> dS[dS_stages];
  Part dQ[consumers];
  RowSums sums[stages];
  Barrier K_full, V_full, Q_full[stages], dO_full[stages], empty[stages];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(Bc == consumers * warpgroup_rows, "a warpgroup owns 64 keys");
static_assert(threads == (consumers + 1) * warpgroup_size, "one warpgroup more, for the producer");
static_assert(dS_stages == 1 || dS_stages == 2, "one that is written while one is read");

template <int columns>
using Sums = float[columns / 2];         // of a product of 64 rows
using Operand = unsigned[Br / step][4];  // a tile's P^T or dS^T, as operands of products

// Named barriers.
constexpr int dS_full = 1;   // both warpgroups have written theirs
constexpr int dS_empty = 2;  // and have read all of what was there before
__device__ __forceinline__ int dQ_full(int warpgroup) {
  return 3 + warpgroup;
}
__device__ __forceinline__ int dQ_empty(int warpgroup) {
  return 3 + consumers + warpgroup;
}
constexpr int consuming_threads = consumers * warpgroup_size;
constexpr int adding_threads = warpgroup_size + warp_size;

__device__ __forceinline__ void make_barriers(Shared& shared) {
  make_barrier(shared.K_full, 1);
  make_barrier(shared.V_full, 1);
  for (int i = 0; i < stages; ++i) {
    make_barrier(shared.Q_full[i], 2);  // Q, and the row sums
    make_barrier(shared.dO_full[i], 1);
    make_barrier(shared.empty[i], consumers);
  }
  publish_barriers();
}

// A block's keys, and the tiles of rows that see some of them, in each head of the group.
struct Work {
  int first_key, kv_head, batch, first_row, end_row, group, M;

  __device__ __forceinline__ long long tile(int head, int row, int heads) const {
    return ((long long)batch * heads + head) * cdiv(M, Br) + row / Br;
  }
  // body(head, first row, number of the tile) for each tile.
  template <class Body>
  __device__ __forceinline__ void for_tiles(int heads, Body body) const {
#pragma unroll 1
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
#pragma unroll 1
      for (int row = first_row; row < end_row; row += Br) body(head, row, tile(head, row, heads));
    }
  }
};

__device__ __forceinline__ Work find_work(int M, int N, int kv_heads, int group, int diagonal,
                                          int lower) {
  // With a causal mask the first keys have the most rows.
  const auto [tile, kv_head, batch] = place(blockIdx.x, max(cdiv(N, Bc), 1), kv_heads);
  const auto rows = rows_that_see(tile * Bc, M, N, diagonal, lower);
  return {tile * Bc, kv_head, batch, rows.first / Br * Br, N > 0 ? rows.end : 0, group, M};
}

// What the producer's one thread does.
__device__ __forceinline__ void produce(Shared& shared, const Work& work, const TensorMap& Q,
                                        const TensorMap& K, const TensorMap& V, const TensorMap& dO,
                                        const RowSums* row_sums, int heads) {
  if (work.first_row >= work.end_row) return;
  load_boxes(shared.K, K, shared.K_full, work.first_key, work.kv_head, work.batch);
  load_boxes(shared.V, V, shared.V_full, work.first_key, work.kv_head, work.batch);
  Turn<stages> turn;
  work.for_tiles(heads, [&](int head, int row, long long tile) {
    const int i = turn.stage;
    wait(shared.empty[i], turn.phase ^ 1);
    load_boxes(shared.Q[i], Q, shared.Q_full[i], row, head, work.batch);
    arrive_expecting(shared.Q_full[i], sizeof(RowSums));
    load_bytes(&shared.sums[i], row_sums + tile, sizeof(RowSums), shared.Q_full[i]);
    load_boxes(shared.dO[i], dO, shared.dO_full[i], row, head, work.batch);
    turn.advance();
  });
}

// What a warp does for a warpgroup: it has dQ of each tile added to the sums in memory.
__device__ __forceinline__ void add_dQ(const Shared& shared, const Work& work, Part* dQ_sum,
                                       int warpgroup, int heads) {
  const bool elected = is_elected();
  work.for_tiles(heads, [&](int, int, long long tile) {
    barrier_arrive(dQ_empty(warpgroup), adding_threads);
    barrier_sync(dQ_full(warpgroup), adding_threads);
    if (elected) {
      add_floats(&dQ_sum[tile * parts + warpgroup % parts].sums[0][0].x,
                 &shared.dQ[warpgroup].sums[0][0].x, sizeof(Part) / sizeof(float));
      commit_stores();
      wait_until_stores_have_read();
    }
    __syncwarp();  // before another thread says that there is room
  });
}

// What a warpgroup of consumers goes through, tile by tile.
struct Consumer {
  Shared& shared;
  int warpgroup, warp, lane;
  float scale2;
  Sums<d_width> dK;
  Sums<dv_width> dV;
  Turn<stages> turn;
  Turn<dS_stages> dS_turn;

  __device__ __forceinline__ Consumer(Shared& shared, int warpgroup, float scale)
      : shared(shared),
        warpgroup(warpgroup),
        warp(threadIdx.x / warp_size % 4),
        lane(threadIdx.x % warp_size),
        scale2(scale * log2e),
        dK(),
        dV() {}

  __device__ __forceinline__ bool leads() const { return threadIdx.x % warpgroup_size == 0; }
  // Of a tile, the first of the two keys that this thread has, and of each 8 rows its first.
  __device__ __forceinline__ int own_key() const {
    return warpgroup * warpgroup_rows + warp * step + fresh(lane) / 4;
  }
  __device__ __forceinline__ int own_row() const { return 2 * (fresh(lane) % 4); }

  // Begins D = A B^T for the warpgroup's keys and the rows of a tile.
  template <int columns, class Keys, class Queries>
  __device__ __forceinline__ void begin_scores(Sums<Br>& S, const Keys& K, const Queries& Q) const {
    begin_products();
#pragma unroll
    for (int k = 0; k < columns / step; ++k) {
      const Matrix keys = by_rows(K.box[k / 4][warpgroup * warpgroup_rows]);
      multiply<scalar>(S, keys + k % 4 * 32, by_rows(Q.box[k / 4]) + k % 4 * 32, k > 0);
    }
    commit_products();
  }

  // Begins to add the products of weights with the rows of a tile.
  template <int count, class Queries>
  __device__ __forceinline__ void begin_sums(float (&sums)[count], const Operand& weights,
                                             const Queries& Q) const {
    begin_products();
#pragma unroll
    for (int k = 0; k < Br / step; ++k)
      multiply<scalar>(sums, weights[k], by_columns(Q.box, Br) + k * 2048, true);
    commit_products();
  }

  // Begins the warpgroup's part of dQ = dS K.
  __device__ __forceinline__ void begin_dQ(Sums<part_width>& dQ) const {
    const auto& dS = shared.dS[dS_turn.stage];
    const int first_row = by_rows_of_dQ ? warpgroup * warpgroup_rows : 0;
    const int first_box = by_columns_of_dQ ? warpgroup : 0;
    const int own_keys = parts == 1 ? warpgroup : 0;
    begin_products();
#pragma unroll
    for (int k = 0; k < (parts == 1 ? warpgroup_rows : Bc) / step; ++k) {
      const Matrix slopes = by_rows(dS.box[k / 4 + own_keys][first_row]) + k % 4 * 32;
      const Matrix keys = by_columns(shared.K.box[first_box][own_keys * warpgroup_rows], Bc);
      multiply_columns<scalar>(dQ, slopes, keys + k * 2048, k > 0);
    }
    commit_products();
  }

  // S^T becomes P^T = 2^(S^T * scale2 - lse2).
  __device__ __forceinline__ void weigh(Sums<Br>& S) const {
    const RowSums& sums = shared.sums[turn.stage];
#pragma unroll
    for (int n = 0; n < Br / 8; ++n) {
      const float2 lse2 = *reinterpret_cast<const float2*>(&sums.lse2[n * 8 + own_row()]);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        S[n * 4 + e] = exp2f(S[n * 4 + e] * scale2 - (e % 2 ? lse2.y : lse2.x));
    }
  }

  // Sets the weights of pairs to 0 that do not count. What of a key and a row decides is how far
  // the key is ahead.
  __device__ __forceinline__ void hide(Sums<Br>& P, const Pairs& pairs) const {
    const int key = pairs.first_key + own_key(), ahead = key - pairs.first_row - own_row();
#pragma unroll
    for (int n = 0; n < Br / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int more = e / 2 * 8, here = ahead + more - (n * 8 + e % 2);
        const bool seen = key + more < pairs.N && (!causal || here <= pairs.diagonal) &&
                          (!windowed || here >= pairs.lower);
        if (!seen) P[n * 4 + e] = 0;
      }
    }
  }

  // dP^T becomes dS^T = P^T * (dP^T - D), without the scale.
  __device__ __forceinline__ void differentiate(const Sums<Br>& P, Sums<Br>& dP) const {
    const RowSums& sums = shared.sums[turn.stage];
#pragma unroll
    for (int n = 0; n < Br / 8; ++n) {
      const float2 delta = *reinterpret_cast<const float2*>(&sums.delta[n * 8 + own_row()]);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        dP[n * 4 + e] = P[n * 4 + e] * (dP[n * 4 + e] - (e % 2 ? delta.y : delta.x));
    }
  }

  __device__ __forceinline__ void pack_weights(const Sums<Br>& sums, Operand& weights) const {
#pragma unroll
    for (int i = 0; i < Br / 4; ++i)
      weights[i / 4][i % 4] = pack<scalar>(sums[2 * i], sums[2 * i + 1]);
  }

  // Writes the warp's columns of dS, whose transpose these are.
  __device__ __forceinline__ void store_dS(const Operand& weights) const {
    const int own = fresh(lane), chunk = warpgroup * (warpgroup_rows / 8) + warp * 2 + own / 8 % 2;
#pragma unroll
    for (int i = 0; i < Br / step; ++i) {
      const int row = i * step + own % 8 + own / 16 * 8;
      store_matrices_transposed(shared.dS[dS_turn.stage].at(row, chunk), weights[i]);
    }
  }

  // Leaves the part of dQ to the warp that adds it.
  __device__ __forceinline__ void pass_dQ(const Sums<part_width>& dQ) const {
    barrier_sync(dQ_empty(warpgroup), adding_threads);
    const int mine = fresh(int(threadIdx.x)) % warpgroup_size;
#pragma unroll
    for (int i = 0; i < part_width / 8; ++i)
      shared.dQ[warpgroup].sums[i][mine] =
          float4{dQ[4 * i], dQ[4 * i + 1], dQ[4 * i + 2], dQ[4 * i + 3]};
    publish_to_copies();
    barrier_arrive(dQ_full(warpgroup), adding_threads);
  }

  // A tile. Its products with dS are under way while others are waited for.
  __device__ __forceinline__ void advance(const Pairs& pairs) {
    const int i = turn.stage;
    Sums<Br> S, dP;
    Sums<part_width> dQ;
    Operand P, dS;
    wait(shared.Q_full[i], turn.phase);
    begin_scores<d_width>(S, shared.K, shared.Q[i]);
    wait(shared.dO_full[i], turn.phase);
    begin_scores<dv_width>(dP, shared.V, shared.dO[i]);
    wait_for_products<1>(S);
    weigh(S);
    if (pairs.first_key + Bc > pairs.N || !pairs.all()) hide(S, pairs);
    wait_for_products<0>(dP);
    differentiate(S, dP);
    pack_weights(S, P);
    pack_weights(dP, dS);
    if (dS_stages == 1) barrier_sync(dS_empty, consuming_threads);
    store_dS(dS);
    begin_sums(dV, P, shared.dO[i]);
    publish_to_copies();
    barrier_sync(dS_full, consuming_threads);
    begin_dQ(dQ);
    begin_sums(dK, dS, shared.Q[i]);
    wait_for_products<1>(dQ);
    pass_dQ(dQ);
    wait_for_products<0>(dK);
    settle(dV);
    if (leads()) arrive(shared.empty[i]);
    dS_turn.advance();
    turn.advance();
  }
};

// Writes the warp's 16 keys of a gradient, 16 bytes at a time where rows lie so.
template <int columns, int count>
__device__ __forceinline__ void store_keys(const float (&sums)[count], float factor, int first_key,
                                           Tensor<scalar> gradient, int batch, int kv_head, int N,
                                           int lane) {
  const bool aligned = is_aligned(gradient);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned pairs[count / 4];
#pragma unroll
    for (int n = 0; n < count / 4; ++n)
      pairs[n] = pack<scalar>(sums[4 * n + 2 * half] * factor, sums[4 * n + 2 * half + 1] * factor);
    const int key = first_key + lane / 4 + half * 8;
    store_row<columns>(gradient.row(batch, kv_head, key), pairs, 0, aligned, key < N, lane);
  }
}

// dK and dV of a warp's 16 keys, by the rows that see each.
__device__ void recompute_keys(Tensor<const scalar> Q, Tensor<const scalar> K,
                               Tensor<const scalar> V, Tensor<const scalar> dO, Tensor<scalar> dK,
                               Tensor<scalar> dV, const RowSums* row_sums, const Work& work,
                               int first_key, int heads, int N, int diagonal, int lower,
                               float scale) {
  constexpr int d_count = cdiv(d, warp_size), dv_count = cdiv(dv, warp_size);
  const int lane = threadIdx.x % warp_size;
  for (int key = first_key; key < min(first_key + step, N); ++key) {
    const scalar* k = K.row(work.batch, work.kv_head, key);
    const scalar* v = V.row(work.batch, work.kv_head, key);
    float k_sums[d_count] = {}, v_sums[dv_count] = {};
    work.for_tiles(heads, [&](int head, int first_row, long long tile) {
      for (int i = 0; i < min(Br, work.M - first_row); ++i) {
        const int row = first_row + i;
        const RowSums& sums = row_sums[tile];
        if (!sums.counts(i) || !sees_key(row, key, N, diagonal, lower)) continue;
        const scalar* q = Q.row(work.batch, head, row);
        const scalar* grad = dO.row(work.batch, head, row);
        const Pair pair = weigh_pair(q, k, grad, v, sums.lse2[i], sums.delta[i], scale, lane);
#pragma unroll
        for (int j = 0; j < d_count; ++j) {
          const int col = lane + j * warp_size;
          if (col < d) k_sums[j] += pair.slope * float(q[col]);
        }
#pragma unroll
        for (int j = 0; j < dv_count; ++j) {
          const int col = lane + j * warp_size;
          if (col < dv) v_sums[j] += pair.weight * float(grad[col]);
        }
      }
    });
#pragma unroll
    for (int j = 0; j < d_count; ++j) {
      const int col = lane + j * warp_size;
      if (col < d) dK.row(work.batch, work.kv_head, key)[col] = scalar(k_sums[j] * scale);
    }
#pragma unroll
    for (int j = 0; j < dv_count; ++j) {
      const int col = lane + j * warp_size;
      if (col < dv) dV.row(work.batch, work.kv_head, key)[col] = scalar(v_sums[j]);
    }
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_columns(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, const __grid_constant__ TensorMap dO_map,
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> dO,
    const RowSums* row_sums, Part* dQ_sum, Tensor<scalar> dK, Tensor<scalar> dV, int M, int N,
    int heads, int kv_heads, int group, int diagonal, int lower, real scale) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) make_barriers(shared);
  __syncthreads();
  const Work work = find_work(M, N, kv_heads, group, diagonal, lower);
  const int warpgroup = uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    give_registers<24>();
    const int warp = uniform(threadIdx.x / warp_size);
    if (warp == 0 && is_elected())
      produce(shared, work, Q_map, K_map, V_map, dO_map, row_sums, heads);
    if (warp > 0 && warp <= consumers) add_dQ(shared, work, dQ_sum, warp - 1, heads);
    return;
  }
  take_registers<240>();
  Consumer consumer(shared, warpgroup, scale);
  if (work.first_row < work.end_row) {
    wait(shared.K_full, 0);
    wait(shared.V_full, 0);
  }
  work.for_tiles(heads, [&](int, int row, long long) {
    consumer.advance({row, work.first_key, M, N, diagonal, lower});
  });

  const int lane = consumer.lane;
  const int first_key = work.first_key + warpgroup * warpgroup_rows + consumer.warp * step;
  if (is_strange(consumer.dK) || is_strange(consumer.dV)) {
    recompute_keys(Q, K, V, dO, dK, dV, row_sums, work, first_key, heads, N, diagonal, lower,
                   scale);
    return;
  }
  store_keys<d>(consumer.dK, scale, first_key, dK, work.batch, work.kv_head, N, lane);
  store_keys<dv>(consumer.dV, 1, first_key, dV, work.batch, work.kv_head, N, lane);
}
