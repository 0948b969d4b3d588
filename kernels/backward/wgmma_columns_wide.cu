// wgmma_columns_wide: `wgmma_columns` for 129 to 256 columns, of Q and K or of dO and V.
//
// dK and dV of 64 keys fill the registers of two warpgroups, so a block has 64 keys: one warpgroup
// sums dV, the other dK. P goes from the first to the second through shared memory; dQ = dS K they
// share out by columns. Products, the copies and the way of dQ to memory are as before.
//
//   Q, dO, dQ [batch, heads, M, d | dv]    K, V, dK, dV [batch, kv_heads, N, d | dv]
//   row_sums [batch, heads, cdiv(M, Br)]    dQ_sum [batch, heads, cdiv(M, Br), parts]
//   counts [batch, kv_heads]
//   grid (max(cdiv(N, Bc), 1) * kv_heads * batch)    block (384)
//   the host sets: scalar, real, Br, Bc, stages, dO_stages, finishes, d, dv, causal, windowed,
//   threads, shared_bytes
#include <backward/parts/last_block.cuh>
#include <ptx/named_barrier.cuh>
#include <ptx/stmatrix.cuh>
#include <tile/shared.cuh>
#include <backward/parts/shared_keys.cuh>

struct Shared {
  TmaTile<scalar, Bc, d> K;
  TmaTile<scalar, Bc, dv> V;
  TmaTile<scalar, Br, d> Q[stages];
  TmaTile<scalar, Br, dv> dO[dO_stages];
  TmaTile<scalar, Br, Bc> dS;
  PassedP P;
  Part dQ[consumers];
  RowSums sums[stages];
  Barrier K_full, V_full, Q_full[stages], Q_empty[stages], dO_full[dO_stages], dO_empty[dO_stages];
  int is_last[consumers];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads == (consumers + 1) * warpgroup_size, "one warpgroup more, for the producer");

// Named barriers, each with one place where threads wait at it. If both warpgroups waited for dS at
// the same one, each at its own place, that would be right, but slower, and compute-sanitizer would
// report threads that diverge.
constexpr int P_full = 1;   // the second warpgroup may read P, and write dS: the last dQ is done
constexpr int dS_full = 2;  // the first may read dS, and P was read
constexpr int dS_kept = 8;  // the second may read dS
__device__ __forceinline__ int dQ_full(int warpgroup) {
  return 3 + warpgroup;
}
__device__ __forceinline__ int dQ_empty(int warpgroup) {
  return 3 + consumers + warpgroup;
}
constexpr int adding_threads = warpgroup_size + warp_size;

// The parts of dQ that a warpgroup computes: the second has more to do besides, so it has one less
// of an odd number.
__device__ __forceinline__ constexpr int first_part(int warpgroup) {
  return warpgroup * cdiv(parts, 2);
}

__device__ __forceinline__ void make_barriers(Shared& shared) {
  init_barrier(shared.K_full, 1);
  init_barrier(shared.V_full, 1);
  for (int i = 0; i < stages; ++i) {
    init_barrier(shared.Q_full[i], 2);  // Q, and the row sums
    // As in wgmma_columns.cu: each thread for row sums, and one for the tiles.
    init_barrier(shared.Q_empty[i], consuming_threads + 1);
  }
  for (int i = 0; i < dO_stages; ++i) {
    init_barrier(shared.dO_full[i], 1);
    init_barrier(shared.dO_empty[i], 1);
  }
  fence_barrier_init();
}

// What the producer's one thread does.
__device__ __forceinline__ void produce(Shared& shared, const Work& work, const TensorMap& Q,
                                        const TensorMap& K, const TensorMap& V, const TensorMap& dO,
                                        const RowSums* row_sums, int heads) {
  if (work.first_row >= work.end_row) return;
  load_async(shared.K, K, shared.K_full, work.first_key, work.kv_head, work.batch);
  load_async(shared.V, V, shared.V_full, work.first_key, work.kv_head, work.batch);
  PipelineState<stages> turn;
  PipelineState<dO_stages> dO_turn;
  work.for_tiles(heads, [&](int head, int row, long long tile) {
    const int i = turn.stage, j = dO_turn.stage;
    wait(shared.Q_empty[i], turn.phase ^ 1);
    load_async(shared.Q[i], Q, shared.Q_full[i], row, head, work.batch);
    arrive_expect_tx(shared.Q_full[i], sizeof(RowSums));
    bulk_load(&shared.sums[i], row_sums + tile, sizeof(RowSums), shared.Q_full[i]);
    wait(shared.dO_empty[j], dO_turn.phase ^ 1);
    load_async(shared.dO[j], dO, shared.dO_full[j], row, head, work.batch);
    turn.advance();
    dO_turn.advance();
  });
}

// What a warp does for a warpgroup: it has parts of dQ of each tile added to the sums in memory.
__device__ __forceinline__ void add_dQ(Shared& shared, const Work& work, Part* dQ_sum, int& count,
                                       int all, int warpgroup, int heads) {
  const bool elected = elect_one();
  const int end = warpgroup == of_dV ? first_part(of_dK) : parts;
  work.for_tiles(heads, [&](int, int, long long tile) {
#pragma unroll 1
    for (int part = first_part(warpgroup); part < end; ++part) {
      barrier_arrive(dQ_empty(warpgroup), adding_threads);
      barrier_sync(dQ_full(warpgroup), adding_threads);
      if (elected) {
        bulk_add(&dQ_sum[tile * parts + part].sums[0][0].x, &shared.dQ[warpgroup].sums[0][0].x,
                 sizeof(Part) / sizeof(float));
        bulk_commit_group();
        bulk_wait_group_read();
      }
      __syncwarp();  // before another thread says that there is room
    }
  });
  if constexpr (finishes) leave_sums(shared.is_last[warpgroup], count, all, elected);
}

// A warpgroup's parts of dQ = dS K.
template <int warpgroup>
struct OwnParts {
  static constexpr int first = first_part(warpgroup);
  static constexpr int count = (warpgroup == of_dV ? first_part(of_dK) : parts) - first;
  Sums<(count > 0 ? count : 1) * part_width> dQ;

  // Begins their products.
  __device__ __forceinline__ void begin(const Shared& shared) {
    if constexpr (count > 0) {
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < Bc / step; ++k) {
        const Matrix own_K = by_columns(shared.K.box[first], Bc) + k * 2048;
        multiply_columns<scalar>(dQ, by_rows(shared.dS.box[0]) + k * 32, own_K, k > 0);
      }
      wgmma_commit_group();
    }
  }

  // Waits for them, but not for so many groups that began since, and leaves them, one by one, to
  // the warp that adds them.
  template <int pending>
  __device__ __forceinline__ void pass(Shared& shared) {
    if constexpr (count > 0) wgmma_wait_group<pending>(dQ);
#pragma unroll
    for (int part = 0; part < count; ++part) {
      barrier_sync(dQ_empty(warpgroup), adding_threads);
      const int mine = opaque(int(threadIdx.x)) % warpgroup_size;
#pragma unroll
      for (int i = 0; i < part_width / 8; ++i) {
        const float* four = &dQ[part * part_width / 2 + 4 * i];
        shared.dQ[warpgroup].sums[i][mine] = float4{four[0], four[1], four[2], four[3]};
      }
      fence_proxy_async();
      barrier_arrive(dQ_full(warpgroup), adding_threads);
    }
  }
};

// What the first warpgroup goes through, tile by tile.
struct ValueConsumer {
  Shared& shared;
  Own own;
  Scorer<float> scorer;
  Sums<dv_width> dV;
  PipelineState<stages> turn;
  PipelineState<dO_stages> dO_turn;

  __device__ __forceinline__ ValueConsumer(Shared& shared, const Scorer<float>& scorer)
      : shared(shared), own(0), scorer(scorer), dV() {}

  // A tile.
  __device__ __forceinline__ void advance(const TilePair<Br, Bc>& pair) {
    const int i = turn.stage, j = dO_turn.stage;
    Sums<Br> S;
    Operands<Br> P;
    OwnParts<of_dV> dQ;
    wait(shared.Q_full[i], turn.phase);
    begin_scores<d_width>(S, shared.K, shared.Q[i], 0);
    wgmma_wait_group<0>(S);
    if constexpr (has_score_mod) {
      Sums<Br> slopes;
      own.compute_P_and_slopes(S, slopes, shared.sums[i], scorer, pair);
      shared.P.write(slopes);
    } else {
      own.compute_P(S, shared.sums[i], scorer.scale * log2e);
      own.mask(S, pair);
      shared.P.write(S);
    }
    barrier_arrive(P_full, consuming_threads);
    arrive(shared.Q_empty[i]);  // row sums were read
    pack_operands(S, P);
    wait(shared.dO_full[j], dO_turn.phase);
    begin_sums(dV, P, shared.dO[j]);
    barrier_sync(dS_full, consuming_threads);
    dQ.begin(shared);
    wgmma_wait_group<1>(dV);
    if (own.leads()) arrive(shared.dO_empty[j]);  // dP was there before dS
    dQ.pass<0>(shared);
    turn.advance();
    dO_turn.advance();
  }
};

// What the second goes through.
struct KeyConsumer {
  Shared& shared;
  Own own;
  Sums<d_width> dK;
  PipelineState<stages> turn;
  PipelineState<dO_stages> dO_turn;

  __device__ __forceinline__ explicit KeyConsumer(Shared& shared) : shared(shared), own(0), dK() {}

  // Writes the warp's columns of dS, whose transpose these are.
  __device__ __forceinline__ void store_dS(const Operands<Br>& operands) const {
    const int lane = opaque(own.lane);
    const int chunk = own.first_key() / 8 + lane / 8 % 2;
#pragma unroll
    for (int i = 0; i < Br / step; ++i) {
      const int row = i * step + lane % 8 + lane / 16 * 8;
      store_matrices_transposed(shared.dS.at(row, chunk), operands[i]);
    }
  }

  // A tile.
  __device__ __forceinline__ void advance() {
    const int i = turn.stage, j = dO_turn.stage;
    Sums<Br> P, dP;
    Operands<Br> dS;
    OwnParts<of_dK> dQ;
    wait(shared.dO_full[j], dO_turn.phase);
    begin_scores<dv_width>(dP, shared.V, shared.dO[j], 0);
    wgmma_wait_group<0>(dP);
    barrier_sync(P_full, consuming_threads);  // and with it Q and the row sums are there
    shared.P.read(P);
    own.compute_dS(P, dP, shared.sums[i]);
    pack_operands(dP, dS);
    store_dS(dS);
    fence_proxy_async();
    barrier_arrive(dS_full, consuming_threads);
    barrier_sync(dS_kept, warpgroup_size);
    dQ.begin(shared);
    begin_sums(dK, dS, shared.Q[i]);
    arrive(shared.Q_empty[i]);  // row sums were read
    dQ.pass<1>(shared);
    wgmma_wait_group<0>(dK);
    if (own.leads()) arrive(shared.Q_empty[i]);  // and Q
    turn.advance();
    dO_turn.advance();
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_columns_wide(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, const __grid_constant__ TensorMap dO_map,
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> dO,
    const RowSums* row_sums, Part* dQ_sum, int* counts, Tensor<scalar> dQ, Tensor<scalar> dK,
    Tensor<scalar> dV, Sizes sizes, int heads, int kv_heads, int group, real scale,
    const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) make_barriers(shared);
  __syncthreads();
  const Work work = find_work(sizes, kv_heads, group);
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    give_to_consumers();
    const int warp = warp_uniform(threadIdx.x / warp_size);
    if (warp == 0 && elect_one())
      produce(shared, work, Q_map, K_map, V_map, dO_map, row_sums, heads);
    if (warp > 0 && warp <= consumers)
      add_dQ(shared, work, dQ_sum, counts[work.batch * kv_heads + work.kv_head],
             consumers * max(cdiv(sizes.N, Bc), 1), warp - 1, heads);
    return;
  }
  take_from_producer();
  const bool any = work.first_row < work.end_row;
  const Scorer<float> scorer = {scale, mods};
  const RepairKeys repair = {work.extent, Q,          K,
                             V,           dO,         {row_sums, work.batch, heads, work.extent.M},
                             scorer,      work.batch, work.kv_head};
  if (warpgroup == of_dV) {
    ValueConsumer values(shared, scorer);
    if (any) wait(shared.K_full, 0);
    work.for_tiles(heads, [&](int, int row, long long) {
      values.advance({work.extent, row, work.first_key});
    });
    store_or_repair<true>(values.dV, dV, values.own, work, repair);
  } else {
    KeyConsumer keys(shared);
    if (any) wait(shared.V_full, 0);  // K is there before dS
    work.for_tiles(heads, [&](int, int, long long) { keys.advance(); });
    store_or_repair<false>(keys.dK, dK, keys.own, work, repair);
  }
  if constexpr (finishes) {
    barrier_sync(sums_left, leaving_threads);
    if (shared.is_last[0] || shared.is_last[1])
      finish_heads(work,
                   {Q, K, V, dO, dQ, row_sums, dQ_sum, work.extent, heads, group, {scale, mods}});
  }
}
