// wgmma_fp8: `wgmma_overlap` with e4m3 operands, whose products are twice as fast as 16-bit ones.
//
// An earlier launch, `quantise`, rounds Q, K and V to e4m3 and transposes V; each tile has a power
// of two as its scale. The scales of Q and K become part of the scale of the scores. O is in units
// of the largest scale of V so far: a larger scale of V rescales O; for a smaller scale, the tile's
// P is scaled down instead. e4m3 inputs are not quantised: TMA loads Q and K directly, and
// `transpose_e4m3` transposes V. Descales replace the tiles' scales; the descale of V multiplies O
// at the end. P is multiplied by 2^offset to use the range of e4m3. Four elements of P fill one
// register of the second product, in V8's order of keys. Rows with wrong results, caused by
// infinities, NaN or huge scores, are recomputed from Q, K and V.
//
// With `persistent`, for e4m3 inputs, a block takes one tile of Q after the other, and loads Q and
// K before `transpose_e4m3` has ended. Otherwise it takes one tile.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   Q8, K8, V8 and Q_scale, K_scale, V_scale: see quantise.cu; e4m3 inputs have only Q, K and V8
//   grid (cdiv(M, Br) * heads * batch; with `persistent` at most multiprocessors)
//   block (128 + 2 * Br)
//   the host sets: scalar, result, real, Br, Bc, Wr, stages, pack_gqa, persistent, bias_bytes, d,
//   dv, threads, shared_bytes and options (extent.cuh)
#include <attention/bias_tile.cuh>
#include <attention/descales.cuh>
#include <attention/nonfinite.cuh>
#include <attention/register_budget.cuh>
#include <attention/row_softmax.cuh>
#include <attention/row_tile.cuh>
#include <attention/score.cuh>
#include <attention/store_rows.cuh>
#include <attention/tile_mask.cuh>
#include <forward/parts/epilogue.cuh>
#include <forward/parts/lazy_row_max.cuh>
#include <forward/parts/ping_pong.cuh>
#include <ptx/dependent_launch.cuh>
#include <ptx/e4m3.cuh>
#include <ptx/setmaxnreg.cuh>
#include <tile/powers.cuh>
#include <tile/shared.cuh>
#include <tile/warpgroup_products.cuh>

constexpr int width = cdiv(dv, step) * step;    // columns of O
constexpr int consumers = Br / warpgroup_rows;  // consumer warpgroups, besides one that loads
constexpr int offset = 6;
constexpr float tolerated = 2.75;  // slack: P is at most 2^(6 + 2.75) = 431 < 448, the e4m3 maximum
constexpr int depth = 32;          // columns of an operand per instruction
constexpr bool e4m3_inputs = sizeof(scalar) == sizeof(E4m3);
constexpr int Q_stages = persistent ? 2 : 1;
constexpr bool by_length = e4m3_inputs && (causal || has_key_tiles);
// Whether the softmax processes a tile in halves. With fewer columns, whole tiles are faster.
constexpr bool in_halves = width > (e4m3_inputs ? 64 : 96);
static_assert(Br % warpgroup_rows == 0 && Wr == step && pack_gqa == 1, "a warpgroup owns 64 rows");
static_assert(e4m3_inputs || !persistent, "Q and K are read before the earlier launch has ended");
static_assert(Bc % depth == 0, "tiles are multiples of the MMA depth");
static_assert(threads == (consumers + 1) * warpgroup_size, "one more warpgroup loads");

using Registers = RegisterBudget<consumers, consumers == 3 ? 32 : 40>;
using Turns = PingPong<consumers>;
using Queries = TmaTile<E4m3, warpgroup_rows, d>;  // Q tile of one warpgroup
using Keys = TmaTile<E4m3, Bc, d>;
using Values = TmaTile<E4m3, width, Bc>;  // transposed: one row per column of V
using Bias = OfWarps<StagedBias<bias_bytes, Bc / 8>, 4 * consumers>;
using PackedP = unsigned[Bc / depth][4];  // P as operands of O += P V

struct Shared {
  Queries Q[Q_stages][consumers];
  Keys K[stages];
  Values V[stages];
  Pipeline<Q_stages> Q_pipeline[consumers];
  Pipeline<stages> K_pipeline, V_pipeline;
  Bias bias;
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

__device__ __forceinline__ void init_pipelines(Shared& shared) {
  for (auto& pipeline : shared.Q_pipeline) pipeline.init(1);
  shared.K_pipeline.init(consumers);
  shared.V_pipeline.init(consumers);
  fence_barrier_init();
}

// The tiles of Q of a block. Those of a head are reversed: under a causal mask the last rows have
// the most keys and should start first. With `by_length`, the longest tiles of all heads come
// first, and odd rounds run from the last block to the first, so that all blocks have about equal
// work.
struct TileOrder {
  const Sizes& sizes;
  const Mods& mods;
  int heads, all_heads, tiles = cdiv(sizes.M, Br), round = 0, index = blockIdx.x;

  __device__ __forceinline__ RowTile task() const {
    const int line = by_length ? index / all_heads : index % tiles;
    const int of_all = by_length ? index % all_heads : index / tiles;
    const int head = of_all % heads, batch = of_all / heads;
    const Extent extent = extent_of(sizes, mods, batch, head);
    int tile = tiles - 1 - line;
    if constexpr (by_length && has_key_tiles) tile = extent.longest(cdiv(sizes.N, Bc), line);
    return row_tile<Br, Bc>(extent, tile * Br, head, batch);
  }
  // Replaces `current` with the block's next tile; returns false if there is none.
  __device__ __forceinline__ bool advance(RowTile& current) {
    if constexpr (!persistent) return false;
    const int slot = ++round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    index = round * gridDim.x + slot;
    if (index >= all_heads * tiles) return false;
    current = task();
    return true;
  }
};

// Returns whether a tile of Q is loaded. Persistent blocks leave tiles without keys out: no product
// would hold back threads until the last one has waited for Q, and it could miss a phase.
__device__ __forceinline__ bool reads_queries(const RowTile& task) {
  return !persistent || task.kv_begin < task.kv_end;
}

// Runs in one thread of the producer warp: for each tile of Q, loads Q, then K and V tile by tile.
__device__ __forceinline__ void produce(Shared& shared, TileOrder order, RowTile task,
                                        const TensorMap& Q, const TensorMap& K, const TensorMap& V,
                                        int group) {
  PipelineState<Q_stages> queries;
  PipelineState<stages> tile;
  do {
    const int kv_head = task.head / group;
    const bool loads_Q = reads_queries(task);
    for (int i = 0; loads_Q && i < consumers; ++i)
      load_async(shared.Q[queries.stage][i], Q, shared.Q_pipeline[i].acquire(queries),
                 task.row + i * warpgroup_rows, task.head, task.batch);
#pragma unroll 1  // not unrolled: the producer has few registers
    for (int first_key = task.kv_begin; first_key < task.kv_end;
         first_key = task.after<Bc>(first_key), tile.advance()) {
      timeline::event(timeline::tile, first_key, task.row);
      load_async(shared.K[tile.stage], K, shared.K_pipeline.acquire(tile), first_key, kv_head,
                 task.batch);
      if constexpr (persistent) wait_for_launch_before();  // it writes V8
      load_async(shared.V[tile.stage], V, shared.V_pipeline.acquire(tile), 0, kv_head, task.batch,
                 first_key);
    }
    if (loads_Q) queries.advance();
  } while (order.advance(task));
  if constexpr (persistent) wait_for_launch_before();  // also without keys
}

// Starts O += P V with e4m3 operands and transposed V.
__device__ __forceinline__ void begin_output(const Values& V, const PackedP& P,
                                             Fragments<step, width>& O) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < Bc / depth; ++k)
    multiply<E4m3>(flat(O), P[k], by_rows(V.box[k / 4]) + k % 4 * wgmma_bytes, true);
  wgmma_commit_group();
}

__device__ __forceinline__ void pack_operands(const Fragments<step, Bc>& S, PackedP& P) {
#pragma unroll
  for (int i = 0; i < Bc / 8; ++i) {
    const float (&low)[4] = S[0][i / 2 * 2], (&high)[4] = S[0][i / 2 * 2 + 1];
    const int half = i % 2 * 2;
    P[i / 4][i % 4] = pack_e4m3(low[half], low[half + 1], high[half], high[half + 1]);
  }
}

// The scales of a tile of K and V. With e4m3 inputs, the scale of K is the product of the descales
// of Q and K, because a single descale may be near the limits of float.
struct Units {
  float K, V;
};

// The scales of all tiles of K and V of a head, and the scale in which O is accumulated.
struct Scales {
  const float *K, *V;  // unused with e4m3 inputs
  float own, of_O = 0;

  __device__ __forceinline__ Units at(int first_key, const Descales& descales) const {
    if constexpr (e4m3_inputs) return {fabs(descales.q * descales.k), 1};
    return {K[first_key / Bc], V[first_key / Bc]};
  }
  // Returns log2(of_V / of_O). Then raises of_O to of_V if of_V is larger.
  __device__ __forceinline__ int take(float of_V) {
    const unsigned before = __float_as_uint(of_O) >> 23;
    of_O = fmax(of_O, of_V);
    return int((__float_as_uint(of_V) >> 23) - before);
  }
  // Returns the scale of Q8 K8^T, clamped to positive finite numbers so that masked scores stay
  // -infinity.
  __device__ __forceinline__ float of_scores(float of_K) const {
    return fmin(fmax(own * of_K, 1.17549435e-38f), largest);
  }
};

// A consumer warpgroup. While it computes the softmax of a tile, the tensor cores work on O += P V
// of the previous tile, and for other warpgroups.
struct Consumer {
  Shared& shared;
  Sizes sizes;
  Scorer<real> scorer;
  int warpgroup, group;
  bool is_first = true;  // whether no tile of Q has begun
  Scales scales = {};    // from here on set by run()
  Descales descales = {};
  Units units = {};
  Rows<step> rows = {0, {}, 0, false};
  Fragments<step, width> O;
  Fragments<step, Bc> S;
  PackedP P;
  PipelineState<Q_stages> queries;
  PipelineState<stages> keys, values;

  __device__ __forceinline__ Rows<step> rows_of(const RowTile& task) const {
    const int lane = threadIdx.x % warp_size, first = threadIdx.x / warp_size * step;
    return Rows<step>(task.row + first - warpgroup_rows + lane / 4,  // warps 0-3 are producers
                      extent_of(sizes, scorer.mods, task.batch, task.head), scorer.scale2());
  }

  // Waits for the warpgroup's turn, then starts S = Q K^T of the next tile of keys.
  __device__ __forceinline__ void begin_scores() {
    shared.K_pipeline.wait(keys);
    Turns::wait(warpgroup);
    ::begin_scores(shared.Q[queries.stage][warpgroup], shared.K[keys.stage], flat(S));
  }
  __device__ __forceinline__ void begin_output() {
    shared.V_pipeline.wait(values);
    ::begin_output(shared.V[values.stage], P, O);
  }
  __device__ __forceinline__ void release_keys() {
    shared.K_pipeline.release(keys);
    keys.advance();
  }
  __device__ __forceinline__ void release_queries() {
    shared.Q_pipeline[warpgroup].release(queries);
    queries.advance();
  }
  __device__ __forceinline__ void release_values() {
    shared.V_pipeline.release(values);
    values.advance();
  }

  // Turns scores into P divided by 2^lowered; row sums are those of the undivided P.
  template <int n>
  __device__ __forceinline__ void exponentiate_lowered(float (&scores)[1][n][4], int first_key,
                                                       int lowered) {
    Rows<step> lower = rows;
    for (float& maximum : lower.maximum[0]) maximum -= offset - lowered;
    for (float& sum : lower.sum[0]) sum *= two_to(-lowered);
    exponentiate(scores, lower, first_key);
    for (int half = 0; half < 2; ++half) rows.sum[0][half] = lower.sum[0][half] * two_to(lowered);
  }

  // Computes softmax() in halves: exponentials of the first half overlap with the previous P V,
  // those of the second half with the packing of P. Added exponents scale P without a branch.
  __device__ __forceinline__ bool softmax_in_halves(int row, int first_key, float (&factor)[1][2]) {
    using Half = float (&)[1][Bc / 16][4];
    Half low = reinterpret_cast<Half>(S[0][0]), high = reinterpret_cast<Half>(S[0][Bc / 16]);
    if (is_masked(rows.extent, row, Br, first_key, Bc)) hide_masked(S, rows, first_key);
    const int above = scales.take(units.V);
    const int lowered = min(max(-above, 0), 40);  // 2^-40 P rounds to 0 in e4m3
    float own[2], again[1][2];
    for (float& x : factor[0]) x = 1;
    find_own_maxima(low, own);
    bool risen = raise_exceeded(own, rows, factor, tolerated);
    find_own_maxima(high, own);
    exponentiate_lowered(low, first_key, lowered);
    if (raise_exceeded(own, rows, again, tolerated)) {
      scale_rows(low, again);
      for (int half = 0; half < 2; ++half) factor[0][half] *= again[0][half];
      risen = true;
    }
    exponentiate_lowered(high, first_key + Bc / 2, lowered);
    if (above > 0)  // 2^-126, the smallest normal float, makes O negligible
      for (float& x : factor[0]) x *= two_to(max(-above, -126));
    return risen || above > 0;
  }

  // Turns S into P in float32. Returns whether O must be rescaled by `factor`.
  __device__ __forceinline__ bool softmax(const RowTile& task, int first_key,
                                          float (&factor)[1][2]) {
    const int lane = threadIdx.x % warp_size;
    if constexpr (has_q_descale || has_k_descale) {  // a negative descale flips the sign of S
      if ((descales.q < 0) != (descales.k < 0))
        for (float& x : flat(S)) x = -x;
    }
    if constexpr (has_score_mod) {  // score_mod expects dequantized products
      for (float& x : flat(S)) x *= scales.own * units.K / rows.scale2;
    } else {
      rows.scale2 = scales.of_scores(units.K);
    }
    shared.bias.own().complete();
    scorer.apply(S, rows, first_key, task.is_full<Bc>(first_key), shared.bias.own());
    if (const int next = task.after<Bc>(first_key); next < task.kv_end)
      shared.bias.own().load(rows, next);
    if constexpr (in_halves) return softmax_in_halves(task.row, first_key, factor);
    bool risen = is_masked(rows.extent, task.row, Br, first_key, Bc)
                     ? raise_maxima<true>(S, rows, first_key, lane, factor, tolerated)
                     : raise_maxima<false>(S, rows, first_key, lane, factor, tolerated);
    rows.scale(factor);
    Rows<step> higher = rows;
    for (float& maximum : higher.maximum[0]) maximum -= offset;
    exponentiate(S, higher, first_key);
    for (int half = 0; half < 2; ++half) rows.sum[0][half] = higher.sum[0][half];
    if (units.V > scales.of_O) {
      for (float& x : factor[0]) x *= scales.of_O / units.V;
      scales.of_O = units.V;
      risen = true;
    }
    if (units.V < scales.of_O) {
#pragma unroll
      for (float& p : flat(S)) p *= units.V / scales.of_O;
    }
    return risen;
  }

  // Prologue: computes P of the first tile of keys; no P V is in flight yet.
  __device__ __forceinline__ void begin(const RowTile& task) {
    timeline::event(timeline::tile, task.kv_begin, task.row);
    float factor[1][2];
    units = scales.at(task.kv_begin, descales);
    if constexpr (in_halves) scales.of_O = units.V;
    shared.bias.own().load(rows, task.kv_begin);
    if (is_first && warpgroup == 0) Turns::arrive(consumers - 1);  // gives it the first turn
    is_first = false;
    begin_scores();
    Turns::arrive(warpgroup);
    wgmma_wait_group<0>(flat(S));
    release_keys();
    softmax(task, task.kv_begin, factor);
    pack_operands(S, P);
  }

  // Main loop step: computes P of this tile, while O += P V of the previous tile is in flight.
  __device__ __forceinline__ void advance(const RowTile& task, int first_key) {
    timeline::event(timeline::tile, first_key, task.row);
    float factor[1][2];
    units = scales.at(first_key, descales);
    begin_scores();
    begin_output();
    Turns::arrive(warpgroup);
    wgmma_wait_group<1>(flat(S));
    release_keys();
    const bool risen = softmax(task, first_key, factor);
    wgmma_wait_group<0>(flat(O));  // until here P V reads P and writes O
    release_values();
    pack_operands(S, P);
    if (risen) scale_rows(O, factor);
  }

  __device__ __forceinline__ void run(const RowTile& task, const Scales& of_tiles,
                                      const Descales& of_inputs) {
    scales = of_tiles;
    descales = of_inputs;
    for (float& x : flat(O)) x = 0;
    rows = rows_of(task);
    for (float& sum : rows.sum[0]) sum *= exp2f(offset);  // scales the sink's term like P
    if (!reads_queries(task)) return;
    shared.Q_pipeline[warpgroup].wait(queries);
    if (task.kv_begin >= task.kv_end) return;
    begin(task);
    for (int first_key = task.after<Bc>(task.kv_begin); first_key < task.kv_end;
         first_key = task.after<Bc>(first_key))
      advance(task, first_key);
    begin_output();
    wgmma_wait_group<0>(flat(O));
    if constexpr (persistent) release_values(), release_queries();
  }

  // Divides O by the row sums and stores it with lse. `of_inputs` equals `descales`, but only
  // in the argument does the compiler see that omitted descales are constants.
  __device__ __forceinline__ void finish(const RowTile& task, const Descales& of_inputs,
                                         Tensor<const scalar> Q, Tensor<const scalar> K,
                                         Tensor<const scalar> V, Tensor<result> out,
                                         Tensor<real> lse) {
    const int batch = task.batch, head = task.head;
    for (float& maximum : rows.maximum[0]) maximum -= offset;
    const bool wrong = overflows(rows) || has_nan(O);  // V8 holds NaN where V is infinite
    if (__any_sync(full_warp, wrong || !are_finite(of_inputs))) {
      const auto [of_Q, of_K, of_scores] = for_repair(of_inputs);
      repair_rows<d, dv>(descaled(Q, of_Q), descaled(K, of_K), descaled(V, of_inputs.v), out, lse,
                         rows, batch, head, head / group, DescaledScorer<real>{scorer, of_scores});
      return;
    }
    const int lane = threadIdx.x % warp_size;
    finish_rows(O, rows, lse, batch, head, lane);
    const float unit[1][2] = {{scales.of_O, scales.of_O}};
    scale_rows(O, unit);
    if constexpr (has_v_descale)
      for (float& x : flat(O)) x = x * of_inputs.v + 0.0f;  // + 0 turns -0 of masked rows into 0
    if constexpr (sizeof(result) == 2)
      store_output<dv>(O, rows, out, batch, head, lane);
    else
      store_rows<dv>(O, rows, out, batch, head, lane);
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_fp8(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, const float* Q_scale, const float* K_scale,
    const float* V_scale, Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V,
    Tensor<result> O, Tensor<real> lse, Sizes sizes, int heads, int group, real scale,
    const __grid_constant__ Mods mods, int batch) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) init_pipelines(shared);
  __syncthreads();
  if constexpr (!persistent) wait_for_launch_before();
  TileOrder order = {sizes, mods, heads, heads * batch};
  RowTile task = order.task();
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    decrease_registers<Registers::producer>();
    if (threadIdx.x < warp_size && elect_one())
      produce(shared, order, task, Q_map, K_map, V_map, group);
    return;
  }
  increase_registers<Registers::consumer>();
  const Scorer<real> scorer = {scale, mods};
  Consumer consumer = {shared, sizes, scorer, warpgroup, group};
  do {
    const int of_all = task.batch * heads + task.head;
    const int first_tile = of_all / group * cdiv(sizes.N, Bc);
    const Descales descales = descales_of(mods, task.batch, task.head / group);
    const float own = e4m3_inputs ? 1 : Q_scale[of_all * cdiv(sizes.M, Br) + task.row / Br];
    consumer.run(task, {K_scale + first_tile, V_scale + first_tile, scorer.scale2() * own},
                 descales);
    consumer.finish(task, descales, Q, K, V, O, lse);
  } while (order.advance(task));
}
