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
#include <forward/parts/consumers.cuh>
#include <ptx/opaque.cuh>
#include <attention/mask.cuh>
#include <forward/parts/row_tile.cuh>
#include <attention/nonfinite.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <forward/parts/ping_pong.cuh>

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
  Barrier full[stages], empty[stages];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(span == Bc || span == 2 * Bc, "a span is one or two tiles of keys");
static_assert(span == Bc || Bv % (2 * step) == 0, "parked weights come for two products in turn");
static_assert(consumers <= 2, "no more have 240 registers a thread");
static_assert(stages >= 2, "one slice is multiplied while another one comes");

__device__ __forceinline__ void make_barriers(Shared& shared) {
  for (int i = 0; i < stages; ++i) {
    init_barrier(shared.full[i], 1);
    init_barrier(shared.empty[i], consumers);
  }
  fence_barrier_init();
}

// The keys of a span, whose last tile may not be full.
struct Span {
  int first_key, keys;

  __device__ __forceinline__ Span(const Work& work, int first_key)
      : first_key(first_key), keys(max(0, min(span, work.end - first_key))) {}
  __device__ __forceinline__ int tiles() const { return cdiv(keys, Bc); }
  __device__ __forceinline__ int keys_of(int tile) const { return min(Bc, keys - tile * Bc); }
};

// What the producer's one thread does for a row tile; for unrolled loops it has too few registers.
__device__ __forceinline__ void produce(Shared& shared, PipelineState<stages>& turn,
                                        const Work& work, const TensorMap& Q, const TensorMap& K,
                                        const TensorMap& V, int kv_head) {
#pragma unroll 1
  for (int first_key = work.start; first_key < work.end; first_key += span) {
    const Span keys(work, first_key);
#pragma unroll 1
    for (int tile = 0; tile < keys.tiles(); ++tile) {
#pragma unroll 1
      for (int slice = 0; slice < slices; ++slice, turn.advance()) {
        auto& to = shared.ring[turn.stage].scores;
        Barrier& full = shared.full[turn.stage];
        const int col = slice * box_columns;
        wait(shared.empty[turn.stage], turn.phase ^ 1);
        arrive_expect_tx(full, sizeof to);
        tma_load(to.Q.box, Q, full, col, work.row, work.head, work.batch);
        tma_load(to.K.box, K, full, col, first_key + tile * Bc, kv_head, work.batch);
      }
    }
#pragma unroll 1
    for (int tile = 0; tile < output_tiles; ++tile) {
#pragma unroll 1
      for (int key = 0; key < keys.keys; key += Bv, turn.advance()) {
        wait(shared.empty[turn.stage], turn.phase ^ 1);
        load_async(shared.ring[turn.stage].V, V, shared.full[turn.stage], first_key + key, kv_head,
                   work.batch, tile * Wv);
      }
    }
  }
}

// The slices that a warpgroup multiplies, one after the other. It gives a stage back when the
// products of the next one have begun and its own have ended.
struct Stream {
  Shared& shared;
  bool leads;
  PipelineState<stages> turn;
  int held = -1;

  __device__ __forceinline__ Slice& next() {
    wait(shared.full[turn.stage], turn.phase);
    wgmma_fence();
    return shared.ring[turn.stage];
  }
  __device__ __forceinline__ void release() {
    if (leads && held >= 0) arrive(shared.empty[held]);
  }
  __device__ __forceinline__ void begun() {
    wgmma_commit_group();
    wgmma_wait_group<1>();
    release();
    held = turn.stage;
    turn.advance();
  }
  // Waits for all products.
  template <int count>
  __device__ __forceinline__ void end(float (&sums)[count]) {
    wgmma_wait_group<0>(sums);
    release();
    held = -1;
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

// What a warpgroup of consumers does for a row tile.
struct Consumer {
  Stream stream;
  int warpgroup, lane, M;
  float scale;

  // The weights of a span: those of its last tile in registers, those of one before it parked.
  __device__ __forceinline__ void weigh(const Span& keys, const Work& work, Rows<step>& rows,
                                        Weights& P) {
    const int seen_by_all = kv_end(work.row, rows.extent.N, rows.extent.causal_offset);
    const int hidden_from_some =
        kv_begin(min(work.row + Br, M) - 1, rows.extent.N, rows.extent.window_offset);
#pragma unroll 1
    for (int tile = 0; tile < keys.tiles(); ++tile) {
      Fragments<step, Bc> S = {};
      float factor[1][2];
      multiply_scores(stream, S, warpgroup);
      if (scale <= 0) {
        for (float& score : flat(S)) score *= scale < 0 ? -1.0f : 0.0f;
      }
      const int first_key = keys.first_key + tile * Bc;
      const bool masked = first_key + Bc > seen_by_all || first_key < hidden_from_some;
      const bool risen = masked
                             ? raise_maxima<true, slack, true>(S, rows, first_key, lane, factor)
                             : raise_maxima<false, slack, true>(S, rows, first_key, lane, factor);
      rows.scale(factor);
      exponentiate(S, rows);
      pack_weights(S, P);
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
    Tensor<const operand> V, Tensor<scalar> O, Tensor<real> lse, real* O_sum, int M, int N,
    int heads, int group, int causal_offset, int window_offset, real scale, int batch) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) make_barriers(shared);
  __syncthreads();
  const int count = cdiv(M, Br) * heads * batch;
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    decrease_registers<24>();
    if (threadIdx.x < warp_size && elect_one()) {
      PipelineState<stages> turn;
      for (int index = blockIdx.x; index < count; index += gridDim.x) {
        const Work work = find_work<Br, Bc>(index, M, N, heads, causal_offset, window_offset);
        produce(shared, turn, work, Q_map, K_map, V_map, work.head / group);
      }
    }
    return;
  }
  increase_registers<240>();
  const int lane = threadIdx.x % warp_size;
  const int own_row = threadIdx.x / warp_size * step - warpgroup_rows;
  Consumer consumer = {{shared, threadIdx.x % warpgroup_size == 0}, warpgroup, lane, M, scale};
#pragma unroll 1
  for (int index = blockIdx.x; index < count; index += gridDim.x) {
    const Work work = find_work<Br, Bc>(index, M, N, heads, causal_offset, window_offset);
    Rows<step> rows(work.row + own_row + lane / 4, Extent{M, N, causal_offset, window_offset},
                    log2e * (scale == 0 ? 1.0f : fabs(scale)));
    bool nonfinite = false;
#pragma unroll 1
    for (int first_key = work.start; first_key == work.start || first_key < work.end;
         first_key += span) {
      const Span keys(work, first_key);
      const float before[2] = {rows.maximum[0][0], rows.maximum[0][1]};
      Weights P;
      consumer.weigh(keys, work, rows, P);
      const bool last = first_key + span >= work.end;
      const float factor[2] = {exp2f(before[0] - rows.maximum[0][0]),
                               exp2f(before[1] - rows.maximum[0][1])};
#pragma unroll 1
      for (int tile = 0; tile < output_tiles; ++tile) {
        Fragments<step, Wv> sums = {};
        consumer.multiply(keys, P, sums);
        // What is needed here alone takes no registers before.
        const Work same =
            find_work<Br, Bc>(opaque(index), M, N, heads, causal_offset, window_offset);
        float4* saved = reinterpret_cast<float4*>(O_sum) +
                        (opaque(int(blockIdx.x)) * (long long)output_tiles + tile) *
                            (Wv / 8 * consumer_threads) +
                        (threadIdx.x - warpgroup_size);
        if (first_key > work.start) add_sums(sums, saved, factor);
        if (last) {
          finish_rows(sums, rows, lse, same.batch, same.head, lane);
          nonfinite |= has_mask && has_nonfinite(sums);
          store_pieces(sums, rows, O, same.batch, same.head, M, lane, tile * Wv);
        } else {
          save_sums(sums, saved);
        }
      }
    }
    if (nonfinite) {
      __syncwarp();  // before rows that other lanes wrote are written once more
      recompute_rows(Q, K, V, O, rows, work.batch, work.head, work.head / group, M, scale);
    }
  }
}
