// mma_slices_backward_rows: dQ = dS K of a round, as a plain product.
//
// A block owns a tile of dQ and walks along the keys that its rows see, in slices of Bd keys. Where
// a round has not all of them the sums wait in memory for the next one's.
//
//   K [batch, kv_heads, N, d]    dQ [batch, heads, M, d]    lse [batch, heads, M]
//   dS: [heads of the round, M, stride], see weight_slices.cuh
//   dQ_sum: scratch, of each block as many floats as its tile has, if there are rounds of keys
//   grid (tiles of d * cdiv(M, Br) * heads of the round)    block (32 * Br * Bc / (Wr * Wc))
//   the host sets: scalar, operand, real, Br, Bc, Wr, Wc, Bd, stages, room, d, dv, causal,
//   windowed, threads, shared_bytes; pack_gqa for row_state.cuh
#include <backward/parts/weight_slices.cuh>

constexpr int own_cols = own_width<d>;
constexpr int tile_cols = tile_width<d>;
constexpr int fragments = Wr / step * (own_cols / 8);  // of dQ that a thread holds, 4 floats each
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
    copy_tile<Bd, false>(to.dS, round.of(dS, opaque(local_head)), opaque(first_row), from,
                         round.stride - from);
    copy_tile<tile_cols, d % tile_cols == 0>(to.K, Head(K, opaque(batch), opaque(kv_head), end),
                                             key, opaque(col), d - col);
    key += Bd;
  }
};

// The sums of dQ of a block, which wait for the next round, as they lie in registers.
__device__ __forceinline__ float4* saved(float* dQ_sum) {
  const long long place = (long long)opaque(int(blockIdx.x)) * (fragments * threads);
  return reinterpret_cast<float4*>(dQ_sum) + place + threadIdx.x;
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_slices_backward_rows(
    Tensor<const operand> K, Tensor<const real> lse, const operand* dS, float* dQ_sum,
    Tensor<scalar> dQ, int M, int N, int heads, int group, int first_head, int first_key,
    int stride, int causal_offset, int window_offset, real scale) {
  Shared& shared = shared_memory<Shared>();
  const auto [tile, row_tile, local_head] = place(blockIdx.x, cdiv(d, tile_cols), cdiv(M, Br));
  const int head = (first_head + local_head) % heads, batch = (first_head + local_head) / heads;
  const int first_row = (cdiv(M, Br) - 1 - row_tile) * Br;  // the longest of a causal mask first
  const int last_row = min(first_row + Br, M) - 1, col = tile * tile_cols;
  const int hidden = kv_begin(first_row, N, window_offset);
  const int visible = kv_end(last_row, N, causal_offset);
  const int start = max(first_key, hidden / Bd * Bd);
  const int end = hidden < visible ? min(visible, first_key + stride) : start;
  Ring<Source> ring = {shared.ring,
                       {dS,
                        K,
                        {first_head, first_key, stride, M},
                        local_head,
                        batch,
                        head / group,
                        first_row,
                        col,
                        start,
                        end}};
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
    Slice& slice = ring.next().template as<Slice>();
    const bool careful =
        has_mask && !all_see(first_row, Br, key, Bd, M, N, causal_offset, window_offset);
    if (careful && __syncthreads_or(has_nonfinite(slice.K))) {
      const Pairs pairs = {opaque(first_row), opaque(key), M, N, causal_offset, window_offset};
      multiply_visible<false>(sums, slice.dS, slice.K, Own(own_cols), pairs, own_lane());
    } else {
      multiply_tiles<false>(sums, slice.dS, slice.K, Own(own_cols), own_lane());
    }
    ring.done();
  }
  Own own(own_cols);
  const int lane = own_lane();
  if (first_key + stride >= N) {  // the last round of keys
#pragma unroll
    for (int i = 0; i < 2 * (Wr / step); ++i) {
      const int row = opaque(first_row) + own.row + i * 8 + lane / 4;
      const bool counts = row < M && *lse.row(batch, head, row) != -infinity;
#pragma unroll
      for (int j = 0; j < own_cols / 4; ++j) {
        float& sum = sums[i / 2][j / 2][i % 2 * 2 + j % 2];
        sum = counts ? sum : 0.0f;  // 0 * NaN of a key would not be 0
      }
    }
    own.col += col;
    store_gradient<d>(dQ, sums, scale, own, batch, head, first_row, M, lane);
  } else {
    float4* to = saved(dQ_sum);
#pragma unroll
    for (int i = 0; i < fragments; ++i) {
      const float (&x)[4] = sums[i / (own_cols / 8)][i % (own_cols / 8)];
      to[i * threads] = {x[0], x[1], x[2], x[3]};
    }
  }
}
