// wgmma_slices: `mma_slices` with the tensor cores of Hopper, for arbitrary head dimensions.
//
// As in `mma_slices`, a tile of S is accumulated over slices of d, and a tile of O over slices of
// keys. All slices pass through one ring of stages that a producer warp fills. A warpgroup owns 64
// rows of both tiles, so P stays in registers between the two products. A span of two tiles of keys
// halves the memory traffic of O between spans: P of the first tile is saved in shared memory.
//
// If one head has few queries, a tile holds the rows of `pack_gqa` heads that share a key head, and
// their keys may be split among several blocks, as in `mma_split_kv`. Keys may lie in pages.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   O_sum: scratch for each block's tiles of O in float, if N > span
//   O_splits, max_splits, sum_splits: results of the splits (kernels/splitting), if splits_keys
//   grid (any size; blocks loop over cdiv(M * pack_gqa, Br) * num_splits * heads / pack_gqa * batch
//   tiles of Q and splits of their keys)
//   block (128 + 2 * Br)
//   the host sets: scalar, result, operand, real, Br, Bc, Wr, span, stages, pack_gqa, splits_keys,
//   d, dv, threads, shared_bytes and options (extent.cuh)
#include <attention/key_boxes.cuh>
#include <attention/nonfinite.cuh>
#include <attention/register_budget.cuh>
#include <attention/row_softmax.cuh>
#include <attention/row_tile.cuh>
#include <attention/score.cuh>
#include <attention/tile_mask.cuh>
#include <forward/parts/epilogue.cuh>
#include <forward/parts/pack_weights.cuh>
#include <forward/parts/split_tasks.cuh>
#include <ptx/opaque.cuh>
#include <ptx/setmaxnreg.cuh>
#include <ptx/wgmma_wait.cuh>
#include <tile/pipeline.cuh>
#include <tile/shared.cuh>
#include <tile/warpgroup.cuh>

constexpr int consumers = Br / warpgroup_rows;  // consumer warpgroups, besides one that loads
static_assert(Br % warpgroup_rows == 0 && Wr == step, "a warpgroup owns 64 rows");
static_assert(Br % pack_gqa == 0, "a box of Q has equally many queries of each head");
static_assert(Bc % step == 0, "tiles are multiples of the MMA depth");
static_assert(threads == (consumers + 1) * warpgroup_size, "one more warpgroup loads");

using Registers = RegisterBudget<consumers, 24>;
using PackedP = unsigned[Bc / step][4];  // P of a tile of keys as operands of O += P V
using OwnRows = Rows<step, pack_gqa>;

constexpr int queries = Br / pack_gqa;          // of each head in a tile of Q
constexpr int d_slices = cdiv(d, box_columns);  // slices of Q and K along d
constexpr int output_tiles = cdiv(dv, 256);     // number of tiles of O, of equal width
constexpr int Wv = step * cdiv(dv, step* output_tiles);

// Returns the number of keys in a slice of V: as many as fit into a stage, but at most `most`.
__host__ __device__ constexpr int keys_in_slice(int most) {
  return Bc % most != 0 || most * cdiv(Wv, box_columns) > Br + Bc ? keys_in_slice(most / 2) : most;
}
constexpr int Bv = keys_in_slice(128);

union Slice {
  struct {
    TmaTile<operand, Br, box_columns> Q;
    TmaTile<operand, Bc, box_columns> K;
  } scores;
  TmaTile<operand, Bv, Wv> V;
};

// Saved P of a tile of keys, as registers of all consumer threads; unused if a span is one tile.
constexpr int consumer_threads = consumers * warpgroup_size;
using SavedP = uint4[span > Bc ? Bc / step : 1][consumer_threads];

struct Shared {
  Slice ring[stages];
  SavedP saved_P;
  Pipeline<stages> pipeline;
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(span == Bc || span == 2 * Bc, "a span is one or two tiles of keys");
static_assert(span == Bc || Bv % (2 * step) == 0, "P is loaded for two products at a time");
static_assert(consumers <= 2, "three consumers would have fewer than 240 registers per thread");
static_assert(stages >= 2, "one slice is multiplied while the next one is loaded");

__device__ __forceinline__ void init_pipeline(Shared& shared) {
  shared.pipeline.init(consumers);
  fence_barrier_init();
}

// The keys of a span; its last tile may be partial.
struct Span {
  int first_key, keys;

  __device__ __forceinline__ Span(const RowTile& task, int first_key)
      : first_key(first_key), keys(max(0, min(span, task.kv_end - first_key))) {}
  __device__ __forceinline__ int tiles() const { return cdiv(keys, Bc); }
  __device__ __forceinline__ int keys_of(int tile) const { return min(Bc, keys - tile * Bc); }
};

// Runs in one thread of the producer warp: loads the slices of a tile of Q. Its loops are not
// unrolled, because the producer has few registers. Packed heads come before rows in Q's map.
__device__ __forceinline__ void produce(Shared& shared, PipelineState<stages>& state,
                                        const RowTile& task, const TensorMap& Q, const KeyBoxes& K,
                                        const KeyBoxes& V) {
#pragma unroll 1
  for (int first_key = task.kv_begin; first_key < task.kv_end; first_key += span) {
    const Span keys(task, first_key);
#pragma unroll 1
    for (int tile = 0; tile < keys.tiles(); ++tile) {
      timeline::event(timeline::tile, first_key + tile * Bc, task.row);
#pragma unroll 1
      for (int slice = 0; slice < d_slices; ++slice, state.advance()) {
        auto& to = shared.ring[state.stage].scores;
        Barrier& full = shared.pipeline.acquire(state);
        const int col = slice * box_columns;
        arrive_expect_tx(full, sizeof to);
        tma_load(to.Q.box, Q, full, col, pack_gqa > 1 ? task.head : task.row,
                 pack_gqa > 1 ? task.row : task.head, task.batch);
        K.load(to.K, full, first_key + tile * Bc, col);
      }
    }
#pragma unroll 1
    for (int tile = 0; tile < output_tiles; ++tile) {
#pragma unroll 1
      for (int key = 0; key < keys.keys; key += Bv, state.advance()) {
        auto& values = shared.ring[state.stage].V;
        Barrier& full = shared.pipeline.acquire(state);
        arrive_expect_tx(full, sizeof values);
        V.load(values, full, first_key + key, tile * Wv);
      }
    }
  }
}

// The sequence of slices that a warpgroup multiplies. A stage is released once its products have
// completed. The warpgroup waits for them after it has committed the next slice's products.
struct Slices {
  Shared& shared;
  PipelineState<stages> state, held;
  bool holds = false;

  __device__ __forceinline__ Slice& next() {
    shared.pipeline.wait(state);
    wgmma_fence();
    return shared.ring[state.stage];
  }
  __device__ __forceinline__ void release() {
    if (holds) shared.pipeline.release(held);
  }
  // Commits the products of this slice, waits for those of the previous one and releases its stage.
  __device__ __forceinline__ void commit() {
    wgmma_commit_group();
    wgmma_wait_group<1>();
    release();
    held = state;
    holds = true;
    state.advance();
  }
  // Waits for all products and releases the last stage.
  template <int count>
  __device__ __forceinline__ void wait(float (&sums)[count]) {
    wgmma_wait_group<0>(sums);
    release();
    holds = false;
  }
};

// S += Q K^T, slice by slice.
__device__ __forceinline__ void multiply_scores(Slices& slices, Fragments<step, Bc>& S,
                                                int warpgroup) {
#pragma unroll 1
  for (int slice = 0; slice < d_slices; ++slice) {
    const auto& [Q, K] = slices.next().scores;
    const Matrix queries = by_rows(Q.box[0][warpgroup * warpgroup_rows]), keys = by_rows(K.box);
#pragma unroll
    for (int k = 0; k < box_columns / step; ++k)
      multiply<operand>(flat(S), queries + k * 32, keys + k * 32, true);
    slices.commit();
  }
  slices.wait(flat(S));
}

// O += P V for a tile of keys.
__device__ __forceinline__ void multiply_output(Slices& slices, const PackedP& P,
                                                Fragments<step, Wv>& O, int keys) {
#pragma unroll
  for (int key = 0; key < Bc; key += Bv) {
    if (key >= keys) break;
    const Matrix values = by_columns(slices.next().V.box, Bv);
#pragma unroll
    for (int k = 0; k < Bv / step; ++k)
      multiply<operand>(flat(O), P[key / step + k], values + k * 2048, true);
    slices.commit();
  }
  slices.wait(flat(O));
}

// Returns an operand of the saved P: P of the span's first tile, in shared memory.
__device__ __forceinline__ uint4& piece(SavedP& saved, int i) {
  return saved[i][threadIdx.x - warpgroup_size];
}

__device__ __forceinline__ void save(SavedP& saved, const PackedP& P) {
#pragma unroll
  for (int i = 0; i < Bc / step; ++i) piece(saved, i) = {P[i][0], P[i][1], P[i][2], P[i][3]};
}

// O += P V with the saved P, which is loaded one product ahead.
__device__ __forceinline__ void multiply_saved(Slices& slices, SavedP& saved,
                                               Fragments<step, Wv>& O) {
  unsigned P[2][4];
#pragma unroll 1
  for (int key = 0; key < Bc; key += Bv) {
    const Matrix values = by_columns(slices.next().V.box, Bv);
#pragma unroll
    for (int k = 0; k < Bv / step; ++k) {
      const uint4 x = piece(saved, key / step + k);
      unsigned (&p)[4] = P[k % 2];
      p[0] = x.x, p[1] = x.y, p[2] = x.z, p[3] = x.w;
      wgmma_fence();
      multiply<operand>(flat(O), p, values + k * 2048, true);
      if (k + 1 < Bv / step) {
        wgmma_commit_group();
        wgmma_wait_group<1>();
      }
    }
    slices.commit();
  }
}

__device__ __forceinline__ unsigned scaled(unsigned pair, float factor) {
  const operand* x = reinterpret_cast<const operand*>(&pair);
  return pack<operand>(float(x[0]) * factor, float(x[1]) * factor);
}

// Rescales the saved P to new maxima. The factors are powers of two, so this is exact.
__device__ void rescale(SavedP& saved, const float (&factor)[1][2]) {
#pragma unroll 1
  for (int i = 0; i < Bc / step; ++i) {
    const auto [a, b] = factor[0];
    const uint4 x = piece(saved, i);
    piece(saved, i) = {scaled(x.x, a), scaled(x.y, b), scaled(x.z, a), scaled(x.w, b)};
  }
}

// Stores a tile of O to global memory in register order; add_sums() adds it, rescaled, to a tile.
__device__ __forceinline__ void save_sums(const Fragments<step, Wv>& O, float4* to) {
#pragma unroll
  for (int n = 0; n < Wv / 8; ++n) {
    const float (&x)[4] = O[0][n];
    to[n * consumer_threads] = {x[0], x[1], x[2], x[3]};
  }
}

__device__ __forceinline__ void add_sums(Fragments<step, Wv>& O, const float4* from,
                                         const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < Wv / 8; ++n) {
    const float4 x = from[n * consumer_threads];
    float (&sums)[4] = O[0][n];
    sums[0] += x.x * factor[0], sums[1] += x.y * factor[0];
    sums[2] += x.z * factor[1], sums[3] += x.w * factor[1];
  }
}

// A consumer warpgroup.
struct Consumer {
  Slices slices;
  Scorer<real> scorer;
  int warpgroup, lane;

  // Computes P of a span. The last tile's P stays in registers, the previous tile's P is saved.
  __device__ __forceinline__ void softmax(const Span& keys, const RowTile& task, OwnRows& rows,
                                          PackedP& P) {
#pragma unroll 1
    for (int tile = 0; tile < keys.tiles(); ++tile) {
      Fragments<step, Bc> S = {};
      float factor[1][2];
      timeline::event(timeline::tile, keys.first_key + tile * Bc, task.row);
      multiply_scores(slices, S, warpgroup);
      const int first_key = keys.first_key + tile * Bc;
      scorer.apply(S, rows, first_key);
      const bool risen = is_masked(rows.extent, task.row, queries, first_key, Bc)
                             ? raise_maxima<true, true>(S, rows, first_key, lane, factor, slack)
                             : raise_maxima<false, true>(S, rows, first_key, lane, factor, slack);
      rows.scale(factor);
      exponentiate<false>(S, rows, first_key);
      pack_weights<operand>(flat(S), P, rows, first_key);
      if constexpr (span > Bc) {
        SavedP& saved = slices.shared.saved_P;
        if (tile + 1 < keys.tiles())
          save(saved, P);
        else if (tile > 0 && risen)
          rescale(saved, factor);
      }
    }
  }

  // Computes a tile of O += P V over all keys of a span.
  __device__ __forceinline__ void multiply(const Span& keys, const PackedP& P,
                                           Fragments<step, Wv>& O) {
    if (span > Bc && keys.tiles() > 1) multiply_saved(slices, slices.shared.saved_P, O);
    multiply_output(slices, P, O, keys.keys_of(max(keys.tiles(), 1) - 1));
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_slices(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, Tensor<const operand> Q, Tensor<const operand> K,
    Tensor<const operand> V, Tensor<result> O, Tensor<real> lse, real* O_sum, float* O_splits,
    float* max_splits, float* sum_splits, int num_splits, Sizes sizes, int heads, int group,
    real scale, int batch, const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) init_pipeline(shared);
  __syncthreads();
  const KeySplits splits(O_splits, max_splits, sum_splits, num_splits);
  const auto task_of = [&](int index) {
    return task_at<queries, Bc, pack_gqa>(index, sizes, mods, heads, splits);
  };
  const int count = cdiv(sizes.M, queries) * splits.count() * (heads / pack_gqa) * batch;
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    decrease_registers<Registers::producer>();
    if (threadIdx.x < warp_size && elect_one()) {
      PipelineState<stages> state;
      for (int index = blockIdx.x; index < count; index += gridDim.x) {
        const Task task = task_of(index);
        if (!task.exists) continue;
        const KeyBoxes keys(K_map, mods, task, task.head / group);
        produce(shared, state, task, Q_map, keys, {V_map, mods, task, task.head / group});
      }
    }
    return;
  }
  increase_registers<Registers::consumer>();
  const int lane = threadIdx.x % warp_size;
  const int own_row = threadIdx.x / warp_size * step - warpgroup_rows + lane / 4;
  const Scorer<real> scorer = {scale, mods};
  Consumer consumer = {{shared}, scorer, warpgroup, lane};
#pragma unroll 1
  for (int index = blockIdx.x; index < count; index += gridDim.x) {
    const Task task = task_of(index);
    if (!task.exists) continue;
    OwnRows rows(task.row * pack_gqa + own_row, extent_of(sizes, mods, task.batch, task.head),
                 scorer.scale2(), task.split == 0);
    bool repair = false;
#pragma unroll 1
    for (int first_key = task.kv_begin; first_key == task.kv_begin || first_key < task.kv_end;
         first_key += span) {
      const Span keys(task, first_key);
      const float before[2] = {rows.maximum[0][0], rows.maximum[0][1]};
      PackedP P;
      consumer.softmax(keys, task, rows, P);
      const float factor[2] = {exp2f(before[0] - rows.maximum[0][0]),
                               exp2f(before[1] - rows.maximum[0][1])};
#pragma unroll 1
      for (int tile = 0; tile < output_tiles; ++tile) {
        Fragments<step, Wv> sums = {};
        consumer.multiply(keys, P, sums);
        // Recomputed from an opaque index, so that it occupies no registers until here.
        const Task same = task_of(opaque(index));
        float4* saved = reinterpret_cast<float4*>(O_sum) +
                        (opaque(int(blockIdx.x)) * (long long)output_tiles + tile) *
                            (Wv / 8 * consumer_threads) +
                        (threadIdx.x - warpgroup_size);
        if (first_key > task.kv_begin) add_sums(sums, saved, factor);
        if (first_key + span < task.kv_end) {
          save_sums(sums, saved);
        } else if (!splits.store<dv>(sums, rows, same.split, same.batch * heads + same.head,
                                     sizes.M, lane, tile * Wv)) {
          repair |= needs_repair(sums, rows);
          finish_rows(sums, rows, lse, same.batch, same.head / pack_gqa, lane);
          store_output<dv>(sums, rows, O, same.batch, same.head / pack_gqa, lane, tile * Wv);
        }
      }
    }
    if (repair) {
      __syncwarp();  // before repairs overwrite rows that other lanes stored
      const Task same = task_of(opaque(index));
      repair_rows<d, dv>(Q, rows_of(K, mods), rows_of(V, mods), O, lse, rows, same.batch,
                         same.head / pack_gqa, same.head / group, scorer);
    }
  }
}
