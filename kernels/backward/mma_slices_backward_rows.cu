// mma_slices_backward_rows: computes dQ = dS K for a round of heads and keys.
//
// A block owns a tile of dQ and loops over the keys that its rows see, in slices of Bd keys. If a
// round does not cover all keys, the accumulators are kept in global memory for the next round.
//
//   K [batch, kv_heads, N, d]    dQ [batch, heads, M, d]    lse [batch, heads, M]
//   dS: [heads of the round, M, stride], see gradient_slices.cuh
//   dQ_sum: scratch, one float per element of a block's tile, if keys take several rounds
//   grid (tiles of d * cdiv(M, Br) * heads of the round)    block (32 * Br * Bc / (Wr * Wc))
//   the host sets: scalar, result, operand, real, Br, Bc, Wr, Wc, Bd, stages, room, d, dv, threads,
//   shared_bytes and options (extent.cuh)
#include <attention/extent.cuh>
#include <backward/parts/all_finite.cuh>
#include <backward/parts/gradient_slices.cuh>
#include <backward/parts/store_gradient.cuh>
#include <backward/parts/tile_products.cuh>
#include <tile/own_lane.cuh>

using Tiles = Slices<threads, Br, Bc, Wr, Wc, Bd, stages>;
using Stage = Tiles::Stage;
using Own = Tiles::Own;

constexpr int own_cols = Tiles::own_width<d>;
constexpr int tile_cols = Tiles::tile_width<d>;
constexpr int fragments = Wr / step * (own_cols / 8);  // 4-float fragments of dQ per thread
using Sums = float[Wr / step][own_cols / 8][4];

struct Shared {
  Stage ring[stages];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

struct Slice {
  operand dS[Br][Bd];
  operand K[Bd][tile_cols];
};

struct Source {
  const operand* dS;
  Tensor<const operand> K;
  Round round;
  int local_head, batch, kv_head, first_row, col, key, end;

  __device__ __forceinline__ void begin(Stage& stage) {
    if (key >= end) return;
    Slice& to = stage.as<Slice>();
    const int from = key - round.first_key;
    copy_tile<threads, Bd, false>(to.dS, round.of(dS, opaque(local_head)), opaque(first_row), from,
                                  round.stride - from);
    copy_tile<threads, tile_cols, d % tile_cols == 0>(
        to.K, Head(K, opaque(batch), opaque(kv_head), end), key, opaque(col), d - col);
    key += Bd;
  }
};

// Returns where a thread keeps its dQ accumulators for the next round, in register order.
__device__ __forceinline__ float4* saved(float* dQ_sum) {
  const long long place = (long long)opaque(int(blockIdx.x)) * (fragments * threads);
  return reinterpret_cast<float4*>(dQ_sum) + place + threadIdx.x;
}

// Recomputes the thread's elements of a round from only the keys that each row sees, because 0
// times an infinity or NaN of a masked key is NaN. The sums are in memory, because a loop over
// registers would have to be unrolled.
__device__ void repair(float* dQ_sum, Tensor<result> dQ, const Head& dS, Tensor<const operand> K,
                       Tensor<const real> lse, const Extent& extent, const Round& round, int batch,
                       int head, int kv_head, int first_row, int first_col, float scale) {
  const bool first = round.first_key == 0, last = round.first_key + round.stride >= extent.N;
  const int lane = threadIdx.x % warp_size;
#pragma unroll 1
  for (int i = 0; i < fragments * 4; ++i) {
    const int row = first_row + i / 4 / (own_cols / 8) * step + i / 2 % 2 * 8 + lane / 4;
    const int col = first_col + i / 4 % (own_cols / 8) * 8 + 2 * (lane % 4) + i % 2;
    float* kept = reinterpret_cast<float*>(saved(dQ_sum) + i / 4 * threads) + i % 4;
    float sum = first ? 0.0f : *kept;
    if (row < extent.M && col < d && *lse.row(batch, head, row) != -infinity) {
      const int end = min(extent.kv_end(row), round.first_key + round.stride);
#pragma unroll 1
      for (int key = max(extent.kv_begin(row), round.first_key); key < end; ++key) {
        if (!extent.shown(row, key)) continue;
        sum +=
            float(dS.row<1>(row)[key - round.first_key]) * float(K.row(batch, kv_head, key)[col]);
      }
    }
    if (!last)
      *kept = sum;
    else if (row < extent.M && col < d)
      dQ.row(batch, head, row)[col] = result(sum * scale);
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_slices_backward_rows(
    Tensor<const operand> K, Tensor<const real> lse, const operand* dS, float* dQ_sum,
    Tensor<result> dQ, Sizes sizes, int heads, int group, int first_head, int first_key, int stride,
    real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const auto [tile, row_tile, local_head] =
      place(blockIdx.x, cdiv(d, tile_cols), cdiv(sizes.M, Br));
  const int head = (first_head + local_head) % heads, batch = (first_head + local_head) / heads;
  const Extent extent = extent_of(sizes, mods, batch, head);
  const int M = extent.M, N = extent.N;
  const int first_row = (cdiv(M, Br) - 1 - row_tile) * Br;  // longest causal tiles first
  const int last_row = min(first_row + Br, M) - 1, col = tile * tile_cols;
  const int kv_begin = extent.kv_begin(first_row);
  const int kv_end = extent.kv_end(last_row);
  const int start = max(first_key, kv_begin / Bd * Bd);
  const int end = kv_begin < kv_end ? min(kv_end, first_key + stride) : start;
  const Round round = {first_head, first_key, stride, M};
  const int kv_head = head / group;
  Ring<Source, Stage, stages> ring = {
      shared.ring, {dS, K, round, local_head, batch, kv_head, first_row, col, start, end}};
  ring.start();
  Sums sums = {};
  if (first_key > 0) {
    const float4* from = saved(dQ_sum);
#pragma unroll
    for (int i = 0; i < fragments; ++i) {
      const float4 x = from[i * threads];
      float (&to)[4] = sums[i / (own_cols / 8)][i % (own_cols / 8)];
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
  }
#pragma unroll 1
  for (int key = start; key < end; key += Bd) {
    timeline::event(timeline::tile, key, first_row);
    Slice& slice = ring.next().template as<Slice>();
    multiply_tiles<false>(sums, slice.dS, slice.K, Own(own_cols), own_lane());
    ring.done();
  }
  Own own(own_cols);
  own.col += col;
  if (!all_finite(sums)) {
    repair(dQ_sum, dQ, round.of(dS, local_head), K, lse, extent, round, batch, head, kv_head,
           first_row + own.row, own.col, scale);
    return;
  }
  if (first_key + stride >= N) {  // the last round of keys
    store_gradient<d>(sums, scale, dQ, batch, head, first_row + own.row, M, own_lane(), own.col);
  } else {
    float4* to = saved(dQ_sum);
#pragma unroll
    for (int i = 0; i < fragments; ++i) {
      const float (&x)[4] = sums[i / (own_cols / 8)][i % (own_cols / 8)];
      to[i * threads] = {x[0], x[1], x[2], x[3]};
    }
  }
}
