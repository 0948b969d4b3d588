// wgmma_slices: `mma_slices` with the tensor cores of Hopper, for head dimensions of any size.
//
// As there Q and K pass by in slices of d and make a tile of S, V in slices of keys and makes a
// tile of O, all through one ring that a producer fills. A warpgroup owns 64 rows of both tiles, so
// P goes from one product to the next in its registers. A span of two tiles of keys halves what O
// costs between spans: P of the first waits in shared memory, as it lies in registers.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   O_sum: scratch, of each block as many floats as its tiles of O have, if N > span
//   grid: any number of blocks, which share out cdiv(M, Br) * heads * batch row tiles
//   block (128 + 2 * Br)
//   the host sets: scalar, operand, real, Br, Bc, Wr, span, stages, pack_gqa, d, dv, causal,
//   windowed, threads, shared_bytes
#include <attention/nonfinite.cuh>
#include <attention/register_budget.cuh>
#include <attention/row_softmax.cuh>
#include <attention/score.cuh>
#include <forward/parts/epilogue.cuh>
#include <forward/parts/ping_pong.cuh>
#include <ptx/opaque.cuh>
#include <ptx/setmaxnreg.cuh>
#include <tile/shared.cuh>
#include <tile/warpgroup.cuh>

constexpr int consumers = Br / warpgroup_rows;  // warpgroups; one more loads
static_assert(Br % warpgroup_rows == 0 && Wr == step && pack_gqa == 1, "a warpgroup owns 64 rows");
static_assert(Bc % step == 0, "a tile is a whole number of products");
static_assert(threads == (consumers + 1) * warpgroup_size, "one more warpgroup loads");

using Registers = RegisterBudget<consumers, 24>;
using Weights = unsigned[Bc / step][4];  // P of a tile of keys, as operands of O += P V

constexpr int slices = cdiv(d, box_columns);  // of Q and K
constexpr int output_tiles = cdiv(dv, 256);   // equally wide
constexpr int Wv = step * cdiv(dv, step* output_tiles);

// The keys of a slice of V: as many as fit into a stage.
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

// P of a tile of keys, as it lies in the threads' registers; a piece of it, if none is parked.
constexpr int consumer_threads = consumers * warpgroup_size;
using Parked = uint4[span > Bc ? Bc / step : 1][consumer_threads];

struct Shared {
  Slice ring[stages];
  Parked parked;
  Pipeline<stages> pipeline;
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(span == Bc || span == 2 * Bc, "a span is one or two tiles of keys");
static_assert(span == Bc || Bv % (2 * step) == 0, "parked weights come for two products in turn");
static_assert(consumers <= 2, "no more have 240 registers a thread");
static_assert(stages >= 2, "one slice is multiplied while another one comes");

__device__ __forceinline__ void init_pipeline(Shared& shared) {
  shared.pipeline.init(consumers);
  fence_barrier_init();
}

// The keys of a span, whose last tile may not be full.
struct Span {
  int first_key, keys;

  __device__ __forceinline__ Span(const RowTile& task, int first_key)
      : first_key(first_key), keys(max(0, min(span, task.kv_end - first_key))) {}
  __device__ __forceinline__ int tiles() const { return cdiv(keys, Bc); }
  __device__ __forceinline__ int keys_of(int tile) const { return min(Bc, keys - tile * Bc); }
};

// What the producer's one thread does for a row tile; for unrolled loops it has too few registers.
__device__ __forceinline__ void produce(Shared& shared, PipelineState<stages>& state,
                                        const RowTile& task, const TensorMap& Q, const TensorMap& K,
                                        const TensorMap& V, int kv_head) {
#pragma unroll 1
  for (int first_key = task.kv_begin; first_key < task.kv_end; first_key += span) {
    const Span keys(task, first_key);
#pragma unroll 1
    for (int tile = 0; tile < keys.tiles(); ++tile) {
#pragma unroll 1
      for (int slice = 0; slice < slices; ++slice, state.advance()) {
        auto& to = shared.ring[state.stage].scores;
        Barrier& full = shared.pipeline.acquire(state);
        const int col = slice * box_columns;
        arrive_expect_tx(full, sizeof to);
        tma_load(to.Q.box, Q, full, col, task.row, task.head, task.batch);
        tma_load(to.K.box, K, full, col, first_key + tile * Bc, kv_head, task.batch);
      }
    }
#pragma unroll 1
    for (int tile = 0; tile < output_tiles; ++tile) {
#pragma unroll 1
      for (int key = 0; key < keys.keys; key += Bv, state.advance()) {
        load_async(shared.ring[state.stage].V, V, shared.pipeline.acquire(state), first_key + key,
                   kv_head, task.batch, tile * Wv);
      }
    }
  }
}

// The slices that a warpgroup multiplies, one after the other. It gives a stage back when the
// products of the next one have begun and its own have ended.
struct Stream {
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
  __device__ __forceinline__ void begun() {
    wgmma_commit_group();
    wgmma_wait_group<1>();
    release();
    held = state;
    holds = true;
    state.advance();
  }
  // Waits for all products.
  template <int count>
  __device__ __forceinline__ void end(float (&sums)[count]) {
    wgmma_wait_group<0>(sums);
    release();
    holds = false;
  }
};

// S += Q K^T, slice by slice.
__device__ __forceinline__ void multiply_scores(Stream& stream, Fragments<step, Bc>& S,
                                                int warpgroup) {
#pragma unroll 1
  for (int slice = 0; slice < slices; ++slice) {
    const auto& [Q, K] = stream.next().scores;
    const Matrix queries = by_rows(Q.box[0][warpgroup * warpgroup_rows]), keys = by_rows(K.box);
#pragma unroll
    for (int k = 0; k < box_columns / step; ++k)
      multiply<operand>(flat(S), queries + k * 32, keys + k * 32, true);
    stream.begun();
  }
  stream.end(flat(S));
}

// O += P V for a tile of keys.
__device__ __forceinline__ void multiply_output(Stream& stream, const Weights& P,
                                                Fragments<step, Wv>& O, int keys) {
#pragma unroll
  for (int key = 0; key < Bc; key += Bv) {
    if (key >= keys) break;
    const Matrix values = by_columns(stream.next().V.box, Bv);
#pragma unroll
    for (int k = 0; k < Bv / step; ++k)
      multiply<operand>(flat(O), P[key / step + k], values + k * 2048, true);
    stream.begun();
  }
  stream.end(flat(O));
}

// Weights that wait in shared memory while others are in registers.
__device__ __forceinline__ uint4& piece(Parked& parked, int i) {
  return parked[i][threadIdx.x - warpgroup_size];
}

__device__ __forceinline__ void park(Parked& parked, const Weights& P) {
#pragma unroll
  for (int i = 0; i < Bc / step; ++i) piece(parked, i) = {P[i][0], P[i][1], P[i][2], P[i][3]};
}

// O += P V for a tile of keys whose weights are parked: those of a product come while the product
// before it goes on.
__device__ __forceinline__ void multiply_parked(Stream& stream, Parked& parked,
                                                Fragments<step, Wv>& O) {
  unsigned P[2][4];
#pragma unroll 1
  for (int key = 0; key < Bc; key += Bv) {
    const Matrix values = by_columns(stream.next().V.box, Bv);
#pragma unroll
    for (int k = 0; k < Bv / step; ++k) {
      const uint4 x = piece(parked, key / step + k);
      unsigned (&p)[4] = P[k % 2];
      p[0] = x.x, p[1] = x.y, p[2] = x.z, p[3] = x.w;
      wgmma_fence();
      multiply<operand>(flat(O), p, values + k * 2048, true);
      if (k + 1 < Bv / step) {
        wgmma_commit_group();
        wgmma_wait_group<1>();
      }
    }
    stream.begun();
  }
}

__device__ __forceinline__ unsigned scaled(unsigned pair, float factor) {
  const operand* x = reinterpret_cast<const operand*>(&pair);
  return pack<operand>(float(x[0]) * factor, float(x[1]) * factor);
}

// Rescales parked weights to new maxima; factors are powers of two, so nothing is rounded.
__device__ void rescale(Parked& parked, const float (&factor)[1][2]) {
#pragma unroll 1
  for (int i = 0; i < Bc / step; ++i) {
    const auto [a, b] = factor[0];
    const uint4 x = piece(parked, i);
    piece(parked, i) = {scaled(x.x, a), scaled(x.y, b), scaled(x.z, a), scaled(x.w, b)};
  }
}

// The warpgroup's part of a tile of O, as it lies in registers, to and from memory.
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

// Row tile `index` of all heads; the longest rows of a causal mask come first.
__device__ __forceinline__ RowTile task_at(int index, const Sizes& sizes, int heads) {
  const int tiles = cdiv(sizes.M, Br);
  const auto [tile, head, batch] = place(index, tiles, heads);
  return row_tile<Br, Bc>(extent_of(sizes, batch), (tiles - 1 - tile) * Br, head, batch);
}

// What a warpgroup of consumers does for a row tile.
struct Consumer {
  Stream stream;
  Scorer<real> scorer;
  int warpgroup, lane;

  // P of a span: of its last tile in registers, of one before it parked.
  __device__ __forceinline__ void softmax(const Span& keys, const RowTile& task, Rows<step>& rows,
                                          Weights& P) {
#pragma unroll 1
    for (int tile = 0; tile < keys.tiles(); ++tile) {
      Fragments<step, Bc> S = {};
      float factor[1][2];
      multiply_scores(stream, S, warpgroup);
      scorer.apply(S);
      const int first_key = keys.first_key + tile * Bc;
      const bool risen = rows.extent.is_masked(task.row, Br, first_key, Bc)
                             ? raise_maxima<true, slack, true>(S, rows, first_key, lane, factor)
                             : raise_maxima<false, slack, true>(S, rows, first_key, lane, factor);
      rows.scale(factor);
      exponentiate(S, rows);
      pack_operands<operand>(flat(S), P);
      if constexpr (span > Bc) {
        Parked& parked = stream.shared.parked;
        if (tile + 1 < keys.tiles())
          park(parked, P);
        else if (tile > 0 && risen)
          rescale(parked, factor);
      }
    }
  }

  // A tile of O += P V, for all keys of a span.
  __device__ __forceinline__ void multiply(const Span& keys, const Weights& P,
                                           Fragments<step, Wv>& O) {
    if (span > Bc && keys.tiles() > 1) multiply_parked(stream, stream.shared.parked, O);
    multiply_output(stream, P, O, keys.keys_of(max(keys.tiles(), 1) - 1));
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_slices(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, Tensor<const operand> Q, Tensor<const operand> K,
    Tensor<const operand> V, Tensor<scalar> O, Tensor<real> lse, real* O_sum, Sizes sizes,
    int heads, int group, real scale, int batch, const __grid_constant__ Mods mods) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) init_pipeline(shared);
  __syncthreads();
  const int count = cdiv(sizes.M, Br) * heads * batch;
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    decrease_registers<Registers::producer>();
    if (threadIdx.x < warp_size && elect_one()) {
      PipelineState<stages> state;
      for (int index = blockIdx.x; index < count; index += gridDim.x) {
        const RowTile task = task_at(index, sizes, heads);
        produce(shared, state, task, Q_map, K_map, V_map, task.head / group);
      }
    }
    return;
  }
  increase_registers<Registers::consumer>();
  const int lane = threadIdx.x % warp_size;
  const int own_row = threadIdx.x / warp_size * step - warpgroup_rows;
  const Scorer<real> scorer = {scale, mods};
  Consumer consumer = {{shared}, scorer, warpgroup, lane};
#pragma unroll 1
  for (int index = blockIdx.x; index < count; index += gridDim.x) {
    const RowTile task = task_at(index, sizes, heads);
    Rows<step> rows(task.row + own_row + lane / 4, extent_of(sizes, task.batch), scorer.scale2());
    bool repair = false;
#pragma unroll 1
    for (int first_key = task.kv_begin; first_key == task.kv_begin || first_key < task.kv_end;
         first_key += span) {
      const Span keys(task, first_key);
      const float before[2] = {rows.maximum[0][0], rows.maximum[0][1]};
      Weights P;
      consumer.softmax(keys, task, rows, P);
      const bool last = first_key + span >= task.kv_end;
      const float factor[2] = {exp2f(before[0] - rows.maximum[0][0]),
                               exp2f(before[1] - rows.maximum[0][1])};
#pragma unroll 1
      for (int tile = 0; tile < output_tiles; ++tile) {
        Fragments<step, Wv> sums = {};
        consumer.multiply(keys, P, sums);
        // What is needed here alone takes no registers before.
        const RowTile same = task_at(opaque(index), sizes, heads);
        float4* saved = reinterpret_cast<float4*>(O_sum) +
                        (opaque(int(blockIdx.x)) * (long long)output_tiles + tile) *
                            (Wv / 8 * consumer_threads) +
                        (threadIdx.x - warpgroup_size);
        if (first_key > task.kv_begin) add_sums(sums, saved, factor);
        if (last) {
          repair |= needs_repair(sums, rows);
          finish_rows(sums, rows, lse, same.batch, same.head, lane);
          store_output<dv>(sums, rows, O, same.batch, same.head, lane, tile * Wv);
        } else {
          save_sums(sums, saved);
        }
      }
    }
    if (repair) {
      __syncwarp();  // before rows that other lanes wrote are written again
      repair_rows<d, dv>(Q, K, V, O, lse, rows, task.batch, task.head, task.head / group, scorer);
    }
  }
}
