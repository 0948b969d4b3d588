// mma_slices_backward_weights: P and dS of a round of heads, in 16 bits, to memory.
//
// S = Q K^T slice by slice of d, P parked in shared memory in float32, then dP = dO V^T by slices
// of dv in the same registers. Tiles that no row sees are not written, for nobody reads them.
//
//   Q, dO [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]
//   lse, delta [batch, heads, M]    P, dS: [heads of the round, M, stride], see weight_slices.cuh
//   grid (max(cdiv(M, Br) * cdiv(keys of the round, Bc), 1) * heads of the round)
//   block (32 * Br * Bc / (Wr * Wc)): each warp owns Wr x Wc of S
//   the host sets: scalar, operand, real, Br, Bc, Wr, Wc, Bd, stages, room, d, dv, causal,
//   windowed, threads, shared_bytes; packed for fragments.cuh
#include <weight_slices.cuh>

constexpr int fragments = Wr / step * (Wc / 8);  // of S that a thread holds, 4 floats each
constexpr int slices = cdiv(d, Bd);              // of Q and K; then those of dO and V follow

struct Shared {
  Stage ring[stages];
  float4 P[fragments][threads];
  float lse[Br];
  float delta[Br];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

struct Slice {
  operand rows[Br][Bd];
  operand keys[Bc][Bd];
};

struct Source {
  Tensor<const operand> Q, K, V, dO;
  int M, N, batch, head, kv_head, first_row, first_key, slice = 0;

  template <int cols>
  __device__ __forceinline__ void copy(Slice& to, Tensor<const operand> of_rows,
                                       Tensor<const operand> of_keys, int col) const {
    const int b = fresh(batch);  // registers do not keep where heads begin
    copy_tile<Bd, cols % Bd == 0>(to.rows, Head(of_rows, b, head, M), first_row, col, cols - col);
    copy_tile<Bd, cols % Bd == 0>(to.keys, Head(of_keys, b, kv_head, N), first_key, col,
                                  cols - col);
  }
  __device__ __forceinline__ void begin(Stage& stage) {
    Slice& to = stage.as<Slice>();
    if (slice < slices)
      copy<d>(to, Q, K, slice * Bd);
    else if (slice < slices + cdiv(dv, Bd))
      copy<dv>(to, dO, V, (slice - slices) * Bd);
    ++slice;
  }
};

using Sums = Fragments<Wc>;

__device__ __forceinline__ void multiply_slices(Ring<Source>& ring, int count, Sums& sums) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    Slice& slice = ring.next().template as<Slice>();
    multiply_transposed(sums, slice.rows, slice.keys, Own(Wc), own_lane());
    ring.done();
  }
}

// dP becomes dS = P * (dP - delta), of the P that is parked; without the scale.
template <bool masked>
__device__ __forceinline__ void slope_parked(Sums& dP, const Shared& shared, const Own& own,
                                             Pairs pairs, int lane) {
  pairs.first_key = fresh(pairs.first_key);  // registers do not keep what counts
#pragma unroll
  for (int i = 0; i < Wr / step; ++i) {
#pragma unroll
    for (int n = 0; n < Wc / 8; ++n) {
      const float4 four = shared.P[i * (Wc / 8) + n][threadIdx.x];
      const float P[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = own.row + i * step + e / 2 * 8 + lane / 4;
        const int key = own.col + n * 8 + 2 * (lane % 4) + e % 2;
        float& x = dP[i][n][e];
        x = P[e] * (x - shared.delta[row]);
        if (masked && !counts(pairs, shared.lse[row], row, key)) x = 0;
      }
    }
  }
}

// Writes a warp's part of P or dS, of which `to` is the tile's first number, as far as there are
// rows and, by eights, columns.
__device__ __forceinline__ void write_weights(operand* to, int stride, const Sums& weights,
                                              const Own& own, int rows, int cols, int lane) {
#pragma unroll
  for (int i = 0; i < 2 * (Wr / step); ++i) {
    const int row = own.row + i * 8 + lane / 4;
    unsigned pairs[Wc / 8];
#pragma unroll
    for (int n = 0; n < Wc / 8; ++n)
      pairs[n] = pack<operand>(weights[i / 2][n][i % 2 * 2], weights[i / 2][n][i % 2 * 2 + 1]);
#pragma unroll
    for (int n = 0; n < Wc / 8; n += 4) {
      const uint2 first = trade_pairs(pairs[n], pairs[n + 1], lane);
      const uint2 second = trade_pairs(pairs[n + 2], pairs[n + 3], lane);
      const uint4 piece = trade_quads(first, second, lane);
      const int col = own.col + (n + lane % 4) * 8;
      if (row < rows && col < cols)
        *reinterpret_cast<uint4*>(to + (long long)row * stride + col) = piece;
    }
  }
}

template <bool masked>
__device__ __forceinline__ void make_weights(Shared& shared, Ring<Source>& ring, operand* P,
                                             operand* dS, int stride, const Pairs& pairs, int cols,
                                             float scale2) {
  Sums sums = {};
  multiply_slices(ring, slices, sums);
  {
    const Own own(Wc);
    const int lane = own_lane();
    weigh<masked>(sums, shared.lse, own, pairs, scale2, lane);
    write_weights(P, stride, sums, own, pairs.M - pairs.first_row, cols, lane);
#pragma unroll
    for (int i = 0; i < fragments; ++i) {
      float (&x)[4] = sums[i / (Wc / 8)][i % (Wc / 8)];
      shared.P[i][threadIdx.x] = {x[0], x[1], x[2], x[3]};
      x[0] = x[1] = x[2] = x[3] = 0;
    }
  }
  multiply_slices(ring, cdiv(dv, Bd), sums);
  const Own own(Wc);
  const int lane = own_lane();
  slope_parked<masked>(sums, shared, own, pairs, lane);
  write_weights(dS, stride, sums, own, pairs.M - pairs.first_row, cols, lane);
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_slices_backward_weights(
    Tensor<const operand> Q, Tensor<const operand> K, Tensor<const operand> V,
    Tensor<const operand> dO, Tensor<const real> lse, Tensor<const real> delta, operand* P,
    operand* dS, int M, int N, int heads, int group, int first_head, int first_key, int stride,
    int diagonal, int lower, real scale) {
  Shared& shared = shared_memory<Shared>();
  const int row_tiles = cdiv(M, Br), key_tiles = cdiv(min(N - first_key, stride), Bc);
  const int tiles = max(row_tiles * key_tiles, 1);
  const int local_head = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const int head = (first_head + local_head) % heads, batch = (first_head + local_head) / heads;
  const int first_row = tile % row_tiles * Br, col = tile / row_tiles * Bc;
  const int key = first_key + col, last_row = min(first_row + Br, M) - 1;
  if (key >= N || visible_keys(last_row, N, diagonal) <= key ||
      hidden_keys(first_row, N, lower) >= key + Bc)
    return;  // the whole block: no row of its tile sees a key of it

  RowSums sums;
  sums.load(lse, delta, batch, head, first_row, M);
  Ring<Source> ring = {shared.ring, {Q, K, V, dO, M, N, batch, head, head / group, first_row, key}};
  ring.start();
  sums.store(shared.lse, shared.delta);
  const bool dead = __syncthreads_or(sums.dead);  // the rows' sums are there
  const Pairs pairs = {first_row, key, M, N, diagonal, lower};
  const bool whole = key + Bc <= N && first_row + Br <= M && !dead && pairs.all();
  const long long place = ((long long)local_head * M + first_row) * stride + col;
  if (whole)
    make_weights<false>(shared, ring, P + place, dS + place, stride, pairs, stride - col,
                        scale * log2e);
  else
    make_weights<true>(shared, ring, P + place, dS + place, stride, pairs, stride - col,
                       scale * log2e);
}
