// wgmma_bias_gradient: computes the gradient of a bias on Hopper's tensor cores.
//
// The bias is added to a score last, so its gradient is dS = P * (dP - delta), summed over the
// batch elements and heads that share it. A block owns 128 rows by 256 keys of the gradient and
// loops over these heads: it recomputes S = Q K^T and dP = dO V^T and accumulates dS in registers.
// No atomics are needed, so that every run returns the same bits.
//
// Blocks are persistent: they load the next tile while they store the last one. The bias of a tile
// is copied to shared memory once, because fragment loads from global memory would touch eight rows
// each.
//
//   Q, dO [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]
//   row_sums [batch, heads, cdiv(M, Br)]    d_bias [batch or 1, heads or 1, M, N]
//   grid (min(multiprocessors, tiles))    block (384)
//   the host sets: scalar, real, Br, Q_stages, dO_stages, KV_stages, bias_stages, bias_bytes (0:
//   the bias is read from global memory), d, dv, threads, shared_bytes and options (extent.cuh)
#include <attention/no_bias.cuh>
#include <attention/register_budget.cuh>
#include <attention/score.cuh>
#include <attention/tile_mask.cuh>
#include <backward/parts/all_finite.cuh>
#include <backward/parts/row_sums.cuh>
#include <backward/parts/sees_distance.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/mma.cuh>
#include <ptx/opaque.cuh>
#include <ptx/setmaxnreg.cuh>
#include <tile/shared.cuh>
#include <tile/store.cuh>
#include <tile/tensor.cuh>
#include <tile/warpgroup_products.cuh>

constexpr int consumers = 2;  // number of consumer warpgroups
constexpr int chunk = 64, chunks = 4;
constexpr int own_rows = consumers * warpgroup_rows, own_keys = chunks * chunk;
constexpr int copying_warps = 3;  // warps of the producer warpgroup that copy the bias
using Registers = RegisterBudget<consumers, 32>;

// A tile of the gradient. Its rows see only keys `begin` … `end` - 1.
struct Task {
  int row, first_key, head, batch, begin, end;

  __device__ __forceinline__ bool has(int key) const { return begin <= key && key < end; }
  __device__ __forceinline__ bool is_whole() const {
    return begin == first_key && end > first_key + own_keys - chunk;
  }
};

// One of the batch elements and heads whose dS is added to a tile.
struct Share {
  int batch, head;
};

// Iterates over the block's tiles, and over the batch elements and heads that share a tile.
struct Tasks {
  Sizes sizes;
  int bias_batch, bias_heads, shared_batch, shared_heads;

  template <class Body>
  __device__ __forceinline__ void for_each(Body body) const {
#pragma unroll 1
    for (int i = blockIdx.x; i < count(); i += gridDim.x) body(at(i));
  }
  __device__ __forceinline__ int key_tiles() const { return cdiv(sizes.N, own_keys); }
  __device__ __forceinline__ int tiles() const { return cdiv(sizes.M, own_rows) * key_tiles(); }
  __device__ __forceinline__ int count() const { return tiles() * bias_heads * bias_batch; }
  __device__ __forceinline__ Task at(int i) const {
    const auto [tile, head, batch] = place(i, tiles(), bias_heads);
    const Extent extent = extent_of(sizes, batch);
    const int row = tile / key_tiles() * own_rows, key = tile % key_tiles() * own_keys;
    const int begin = max(key, extent.kv_begin(row) / chunk * chunk);
    const int end = min(key + own_keys, extent.kv_end(min(row + own_rows, extent.M) - 1));
    return {row, key, head, batch, begin, end};
  }
  __device__ __forceinline__ bool has(const Task& task, const Share& share) const {
    return share.batch < task.batch + shared_batch;
  }
  __device__ __forceinline__ Share after(const Task& task, const Share& share) const {
    if (share.head + 1 < task.head + shared_heads) return {share.batch, share.head + 1};
    return {share.batch + 1, task.head};
  }
};

using BiasChunk = TmaTile<scalar, own_rows, chunk>;

// The bias of a warp's scores in a chunk, from first_row of the tile on.
struct BiasPairs {
  static constexpr bool is_used = true;
  scalar* row;  // the row whose address the lane passes to ldmatrix
  unsigned swizzle;

  __device__ __forceinline__ BiasPairs(BiasChunk& of, int first_row) {
    const unsigned lane = threadIdx.x % warp_size;
    row = of.box[0][first_row + lane % 8];
    swizzle = lane % 8 ^ lane / 8;
  }
  // The lane's bias elements in its row `half`, for its keys j to j + 7 (see wgmma.cuh).
  struct Part {
    unsigned r[4];
  };
  __device__ __forceinline__ Part part(int half, int j) const {
    Part part;
    ldmatrix(part.r, row + half * 8 * chunk + (j / 2 ^ swizzle) * 8);
    return part;
  }
  // Returns the index of key j together with its bias element.
  __device__ __forceinline__ HeldIndex index(Index key, const Part& part, int j) const {
    return {key, part.r[j / 2 % 4], j % 2 != 0};
  }
};

// The bias of a tile in shared memory, in chunks. It stays there for all heads that share the tile.
template <int stages>
struct CopiedBias {
  static_assert(stages >= chunks, "all of a tile's bias fits");
  using State = PipelineState<stages>;
  BiasChunk copied[stages];
  Pipeline<stages> pipeline;

  __device__ __forceinline__ void init() {
    pipeline.init(consumers * warpgroup_size / warp_size);  // every consumer warp arrives once
  }

  // Copies a chunk; keys past the end become 0, and rows past the end repeat the last one.
  template <class Arrays>  // Mods; a template, so that held_row() is looked up only if used
  __device__ __forceinline__ void copy(BiasChunk& to, const Task& task, int first_key,
                                       const Sizes& sizes, const Arrays& mods) {
    constexpr int pieces = chunk / 8, rows_at_once = warp_size / pieces;
    const int lane = threadIdx.x % warp_size, piece = lane % pieces, key = first_key + piece * 8;
    const int left = max(0, min(8, sizes.N - key));
#pragma unroll 4
    for (int row = lane / pieces; row < own_rows; row += rows_at_once) {
      const Index query(min(task.row + row, sizes.M - 1));
      const auto* from = held_row(mods, task.batch, task.head, query);
      cp_async(to.at(row, piece), from + (left ? key : 0), left * int(sizeof(scalar)));
    }
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncwarp();
  }

  // Copies this warp's chunks of all tiles. Each stage always belongs to the same warp.
  template <class Arrays>
  __device__ __forceinline__ void copy_all(const Tasks& tasks, const Arrays& mods, int warp) {
    State at;
    tasks.for_each([&](const Task& task) {
#pragma unroll 1
      for (int key = task.begin; key < task.end; key += chunk, at.advance()) {
        if (at.stage % copying_warps != warp) continue;
        Barrier& full = pipeline.acquire(at);
        copy(copied[at.stage], task, key, tasks.sizes, mods);
        if (threadIdx.x % warp_size == 0) arrive(full);
      }
    });
  }

  __device__ __forceinline__ void wait(const State& at) { pipeline.wait(at); }
  // Returns a warp's part of the bias of a chunk, from first_row of the tile on.
  __device__ __forceinline__ BiasPairs pairs(const State& at, int first_row) {
    return BiasPairs(copied[at.stage], first_row);
  }
  // Ends the warp's reads of a chunk. For the last head that shares the tile, releases the chunk.
  __device__ __forceinline__ void end(State& at, bool is_last_share) {
    __syncwarp();
    if (is_last_share && threadIdx.x % warp_size == 0) pipeline.arrive(at);
    at.advance();
  }
};

// Without copies, expressions read the bias from global memory: either it does not fit, or another
// array is staged in shared memory.
template <>
struct CopiedBias<0> {
  struct State {};

  __device__ __forceinline__ void init() {}
  __device__ __forceinline__ void copy_all(const Tasks&, const Mods&, int) {}
  __device__ __forceinline__ void wait(const State&) {}
  __device__ __forceinline__ NoBias pairs(const State&, int) { return {}; }
  __device__ __forceinline__ void end(State&, bool) {}
};
using Bias = CopiedBias<bias_stages>;

struct Shared {
  TmaTile<scalar, own_rows, d> Q[Q_stages];
  TmaTile<scalar, own_rows, dv> dO[dO_stages];
  TmaTile<scalar, chunk, d> K[KV_stages];
  TmaTile<scalar, chunk, dv> V[KV_stages];
  Pipeline<Q_stages> Q_pipeline;
  Pipeline<dO_stages> dO_pipeline;
  Pipeline<KV_stages> K_pipeline, V_pipeline;
  Bias bias;
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads == (consumers + 1) * warpgroup_size, "one more warpgroup loads");
static_assert(has_score_mod, "a bias is an expression");
static_assert(bias_bytes == 0 || bias_bytes == sizeof(scalar), "the bias has the tensors' dtype");

__device__ __forceinline__ void init_pipelines(Shared& shared) {
  shared.Q_pipeline.init(consumers);
  shared.dO_pipeline.init(consumers);
  shared.K_pipeline.init(consumers);
  shared.V_pipeline.init(consumers);
  shared.bias.init();
  fence_barrier_init();
}

// The elected producer thread loads Q and dO of each head that shares a tile and, chunk by chunk, K
// and V. With a single stage, Q or dO becomes free only after the last products of the previous
// head, so the first K and V are loaded before it.
__device__ __forceinline__ void produce(Shared& shared, const Tasks& tasks, const TensorMap& Q,
                                        const TensorMap& K, const TensorMap& V, const TensorMap& dO,
                                        int group) {
  PipelineState<Q_stages> queries;
  PipelineState<dO_stages> gradients;
  PipelineState<KV_stages> keys;
  tasks.for_each([&](const Task& task) {
    if (task.begin >= task.end) return;
#pragma unroll 1
    for (Share share = {task.batch, task.head}; tasks.has(task, share);
         share = tasks.after(task, share), queries.advance(), gradients.advance()) {
      const int batch = share.batch, head = share.head;
      const auto load_queries = [&] {
        load_async(shared.Q[queries.stage], Q, shared.Q_pipeline.acquire(queries), task.row, head,
                   batch);
      };
      if (Q_stages > 1) load_queries();
#pragma unroll 1  // not unrolled: the producer has few registers
      for (int key = task.begin; key < task.end; key += chunk, keys.advance()) {
        load_async(shared.K[keys.stage], K, shared.K_pipeline.acquire(keys), key, head / group,
                   batch);
        load_async(shared.V[keys.stage], V, shared.V_pipeline.acquire(keys), key, head / group,
                   batch);
        if (key > task.begin) continue;
        if (Q_stages == 1) load_queries();
        load_async(shared.dO[gradients.stage], dO, shared.dO_pipeline.acquire(gradients), task.row,
                   head, batch);
      }
    }
  });
}

// The thread's two rows, with the interface that Scorer::apply expects.
struct OwnStats {
  RowStats rows[2];
};
struct OwnRows {
  static constexpr int heads = 1;
  int first;
  Extent extent;
  OwnStats stats;

  __device__ __forceinline__ int existing(int, int half) const {
    return min(first + half * 8, extent.M - 1);
  }
};

// A consumer warpgroup.
struct Consumer {
  using Sums = float[chunks][chunk / 8][4];
  using Products = float[1][chunk / 8][4];

  Shared& shared;
  Tasks tasks;
  Scorer<float> scorer;
  const RowSums<Br>* row_sums;
  int heads, warpgroup;
  PipelineState<Q_stages> queries;
  PipelineState<dO_stages> gradients;
  PipelineState<KV_stages> keys;
  Bias::State biases;

  // Returns the warp's first row within its tile; warps 0 to 3 belong to the producer.
  __device__ __forceinline__ int tile_row() const {
    return opaque(int(threadIdx.x)) / warp_size * step - warpgroup_rows;
  }
  __device__ __forceinline__ int row(const Task& task) const { return task.row + tile_row(); }
  // Reads row statistics. A warp whose rows are all past the end reads values but does not use
  // them.
  __device__ __forceinline__ OwnStats stats(const Task& task, const Share& share) const {
    const int M = tasks.sizes.M, existing = min(row(task), M - 1);
    const long long first = ((long long)share.batch * heads + share.head) * cdiv(M, Br);
    const RowSums<Br>& all = row_sums[first + existing / Br];
    const int own = (row(task) + int(threadIdx.x) % warp_size / 4) % unsigned(Br);
    return {{{all.lse2[own], all.delta[own]}, {all.lse2[own + 8], all.delta[own + 8]}}};
  }

  // Sums dS over all heads that share the tile. Prefetches the row sums of the next head.
  __device__ __forceinline__ void sum(const Task& task, Sums& sums) {
    const int first = opaque(row(task) + int(threadIdx.x) % warp_size / 4);
    const Bias::State first_bias = biases;
    Share share = {task.batch, task.head};
    OwnStats next = stats(task, share);
#pragma unroll 1
    for (bool is_last = false; !is_last; queries.advance(), gradients.advance()) {
      const Extent extent = extent_of(tasks.sizes, scorer.mods, share.batch, share.head);
      const OwnRows rows = {first, extent, next};
      share = tasks.after(task, share);
      is_last = !tasks.has(task, share);
      if (!is_last) next = stats(task, share);
      biases = first_bias;
      shared.Q_pipeline.wait(queries);
      if (task.is_whole())
        add_chunks<true>(task, rows, is_last, sums);
      else
        add_chunks<false>(task, rows, is_last, sums);
    }
  }

  // Adds dS of all chunks in which a row sees a key. Code for whole tiles has no branches.
  template <bool is_whole>
  __device__ __forceinline__ void add_chunks(const Task& task, const OwnRows& rows,
                                             bool is_last_share, Sums& sums) {
#pragma unroll
    for (int j = 0; j < chunks; ++j) {
      const int key = task.first_key + j * chunk;
      if (is_whole || task.has(key))
        add(task, rows, key, is_whole ? j + 1 == chunks : key + chunk >= task.end, is_last_share,
            products_of(sums, j));
    }
  }
  static __device__ __forceinline__ Products& products_of(Sums& sums, int j) {
    return reinterpret_cast<Products&>(sums[j]);
  }

  // Adds dS of a chunk. The last head that shares the tile releases the bias.
  __device__ __forceinline__ void add(const Task& task, const OwnRows& rows, int key, bool is_last,
                                      bool is_last_share, Products& sums) {
    Products S, dP;
    shared.K_pipeline.wait(keys);
    begin_scores(shared.Q[queries.stage], shared.K[keys.stage], flat(S),
                 warpgroup * warpgroup_rows);
    shared.V_pipeline.wait(keys);
    shared.dO_pipeline.wait(gradients);
    begin_scores(shared.dO[gradients.stage], shared.V[keys.stage], flat(dP),
                 warpgroup * warpgroup_rows);
    shared.bias.wait(biases);
    const auto bias = shared.bias.pairs(biases, tile_row());
    wgmma_wait_group<1>(flat(S));
    shared.K_pipeline.release(keys);
    if (is_last) shared.Q_pipeline.release(queries);
    compute_P(S, rows, task, key, bias);
    shared.bias.end(biases, is_last_share);
    wgmma_wait_group<0>(flat(dP));
    shared.V_pipeline.release(keys);
    if (is_last) shared.dO_pipeline.release(gradients);
    keys.advance();
    drop(dP, rows, key);
#pragma unroll
    for (int i = 0; i < chunk / 2; ++i)
      flat(sums)[i] += flat(S)[i] * (flat(dP)[i] - rows.stats.rows[i / 2 % 2].delta);
  }

  // Replaces S with P, or with 0 where the pair is hidden.
  template <class Pairs>
  __device__ __forceinline__ void compute_P(Products& S, const OwnRows& rows, const Task& task,
                                            int first_key, const Pairs& bias) const {
    scorer.apply(S, rows, first_key, false, bias);
#pragma unroll
    for (int i = 0; i < chunk / 2; ++i)
      flat(S)[i] = exp2f(flat(S)[i] * scorer.scale2() - rows.stats.rows[i / 2 % 2].lse2);
    const Extent& extent = rows.extent;
    if (!is_masked(extent, task.row, own_rows, first_key, chunk)) return;
    // The mask depends only on the distance of a key from a row.
    const int key = first_key + 2 * (opaque(int(threadIdx.x)) % 4);
    const int distance = key - opaque(rows.first);
#pragma unroll
    for (int i = 0; i < chunk / 2; ++i) {
      const int more = i / 4 * 8 + i % 2, down = i / 2 % 2 * 8;
      const bool seen = key + more < extent.N && sees_distance(extent, distance + more - down);
      if (!seen) flat(S)[i] = 0;
    }
  }

  // Applies dropout to dP.
  template <class Rows>  // a template, so that names of dropout.cuh are looked up only if used
  __device__
  __forceinline__ void drop([[maybe_unused]] Products& dP, [[maybe_unused]] const Rows& rows,
                            [[maybe_unused]] int first_key) const {
    if constexpr (has_dropout)
      for_weights(dP, rows.extent, rows.first, first_key + 2 * (threadIdx.x % 4),
                  [&](int i, int n, int e, bool kept) {
                    dP[i][n][e] = kept ? dP[i][n][e] * rows.extent.kept_factor() : 0.0f;
                  });
  }

  // Rounds the warp's rows of a tile to the dtype of the bias and stores them.
  __device__ __forceinline__ void store(const Task& task, const Sums& sums,
                                        const Tensor<scalar>& d_bias) const {
    const int N = tasks.sizes.N, lane = threadIdx.x % warp_size;
    const bool aligned = is_aligned(d_bias) && N % 8 == 0;
#pragma unroll
    for (int j = 0; j < 2 * chunks; ++j) {
      const int row = this->row(task) + j % 2 * 8 + lane / 4, key = task.first_key + j / 2 * chunk;
      unsigned pairs[chunk / 8];
#pragma unroll
      for (int n = 0; n < chunk / 8; ++n)
        pairs[n] = pack<scalar>(sums[j / 2][n][j % 2 * 2], sums[j / 2][n][j % 2 * 2 + 1]);
      store_row<chunk>(d_bias.row(task.batch, task.head, row) + key, pairs, 0, aligned,
                       row < tasks.sizes.M, lane, N - key);
    }
  }
};

// Recomputes sums that are infinite or NaN, pair by pair, from only visible pairs with a nonzero
// weight, because 0 * NaN is NaN.
struct Repair {
  Tensor<const scalar> Q, K, V, dO;
  Tensor<const real> lse;
  int group;

  __device__ __forceinline__ float dS(const Consumer& of, const Share& share, int row,
                                      int key) const {
    const auto [batch, head] = share;
    const StatsOfTiles<Br> stats = {of.row_sums, {batch, of.heads, of.tasks.sizes.M}, lse, batch};
    const RawStats own = stats(head, row);
    const Extent extent = extent_of(of.tasks.sizes, of.scorer.mods, batch, head);
    if (own.lse == -infinity || !extent.sees(row, key)) return 0;
    const scalar *q = Q.row(batch, head, row), *k = K.row(batch, head / group, key);
    const scalar *grad = dO.row(batch, head, row), *v = V.row(batch, head / group, key);
    float product = 0, dP = 0;
#pragma unroll 1
    for (int i = 0; i < d; ++i) product += float(q[i]) * float(k[i]);
#pragma unroll 1
    for (int i = 0; i < dv; ++i) dP += float(grad[i]) * float(v[i]);
    const float p = weight_of(of.scorer.modified(product, extent, row, key), own.lse);
    return p == 0 ? 0.0f : p * (extent.dropped(dP, row, key) - own.delta);
  }

  // Recomputes the warp's rows of a tile.
  __device__ __forceinline__ void rows(const Consumer& of, const Task& task,
                                       const Tensor<scalar>& d_bias) const {
    const int first = of.row(task), lane = threadIdx.x % warp_size;
    const int end = min(task.first_key + own_keys, of.tasks.sizes.N);
#pragma unroll 1
    for (int row = first; row < min(first + step, of.tasks.sizes.M); ++row) {
#pragma unroll 1
      for (int key = task.first_key + lane; key < end; key += warp_size) {
        float sum = 0;
#pragma unroll 1
        for (Share share = {task.batch, task.head}; of.tasks.has(task, share);
             share = of.tasks.after(task, share))
          sum += dS(of, share, row, key);
        d_bias.row(task.batch, task.head, row)[key] = scalar(sum);
      }
    }
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_bias_gradient(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, const __grid_constant__ TensorMap dO_map,
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<const scalar> dO,
    Tensor<const real> lse, const RowSums<Br>* row_sums, Tensor<scalar> d_bias, Sizes sizes,
    int bias_batch, int bias_heads, int batch, int heads, int group, real scale,
    const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) init_pipelines(shared);
  __syncthreads();
  const Tasks tasks = {sizes, bias_batch, bias_heads, batch / bias_batch, heads / bias_heads};
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    decrease_registers<Registers::producer>();
    const int warp = warp_uniform(threadIdx.x / warp_size);
    if (warp > 0) {
      shared.bias.copy_all(tasks, mods, warp - 1);
    } else if (elect_one()) {
      produce(shared, tasks, Q_map, K_map, V_map, dO_map, group);
    }
    return;
  }
  increase_registers<Registers::consumer>();
  Consumer consumer = {shared, tasks, {scale, mods}, row_sums, heads, warpgroup};
  const Repair repair = {Q, K, V, dO, lse, group};
  tasks.for_each([&](const Task& task) {
    Consumer::Sums sums = {};
    if (task.begin < task.end) consumer.sum(task, sums);
    if (all_finite(sums))
      consumer.store(task, sums, d_bias);
    else
      repair.rows(consumer, task, d_bias);
  });
}
