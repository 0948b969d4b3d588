// mma_slices_backward_columns: dV = P^T dO and dK = dS^T Q of a round, as plain products.
//
// A block owns a tile of one of them and walks down the rows that see its keys, of all heads that
// share them, in slices of Bd rows.
//
//   Q, dO [batch, heads, M, d | dv]    dK, dV [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   P, dS: [heads of the round, M, stride], see weight_slices.cuh
//   grid (max(cdiv(keys of the round, Br), 1) * (tiles of dv + tiles of d) * kv_heads of the round)
//   block (32 * Br * Bc / (Wr * Wc))
//   the host sets: scalar, operand, real, Br, Bc, Wr, Wc, Bd, stages, room, d, dv, causal,
//   windowed, threads, shared_bytes; pack_gqa for row_state.cuh
#include <backward/parts/weight_slices.cuh>

struct Shared {
  Stage ring[stages];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

template <int cols>
struct Slice {
  operand weights[Bd][Br];
  operand values[Bd][tile_width<cols>];
};

// The rows of one head after the other.
struct RowWalk {
  int local_head, row, start, end, left;

  __device__ __forceinline__ void advance() {
    --left;
    row += Bd;
    if (row < end) return;
    row = start;
    ++local_head;
  }
};

template <int cols>
struct Source {
  const operand* weights;
  Tensor<const operand> values;
  Round round;
  int heads, key, col;
  RowWalk rows;

  __device__ __forceinline__ void begin(Stage& stage) {
    if (rows.left <= 0) return;
    Slice<cols>& to = stage.as<Slice<cols>>();
    const int from = opaque(key) - round.first_key, head = round.first_head + rows.local_head;
    copy_tile<Br, false>(to.weights, round.of(weights, rows.local_head), rows.row, from,
                         round.stride - from);
    copy_tile<tile_width<cols>, cols % tile_width<cols> == 0>(
        to.values, Head(values, head / heads, head % heads, round.M), rows.row, col, cols - col);
    rows.advance();
  }
};

// Zeros for rows that see no key, of values that hold infinities or NaN.
template <int width>
__device__ __forceinline__ void clear_dead(operand (&values)[Bd][width], Tensor<const real> lse,
                                           int batch, int head, int first_row, int M) {
#pragma unroll 1
  for (int i = threadIdx.x; i < Bd * width; i += threads) {
    const int row = first_row + i / width, col = i % width;
    if (row < M && *lse.row(batch, head, row) == -infinity)
      at(values, i / width, col / in_chunk)[col % in_chunk] = operand(0.0f);
  }
}

template <int cols>
__device__ __forceinline__ void sum_tile(Shared& shared, const operand* weights,
                                         Tensor<const operand> values, Tensor<const real> lse,
                                         Tensor<scalar> gradient, const Round& round, int heads,
                                         int group, int local_kv_head, int key, int col, int N,
                                         int causal_offset, int window_offset, float factor) {
  constexpr int width = own_width<cols>;
  const int M = round.M, last_key = min(key + Br, N) - 1, first = local_kv_head * group;
  int start = 0, end = M;  // the rows that see a key of the tile
  if constexpr (causal) start = int(max(0LL, min((long long)M, key - (long long)causal_offset)));
  if constexpr (windowed)
    end = int(max(0LL, min((long long)M, last_key - (long long)window_offset + 1)));
  const bool some = key < N && start < end;
  start = start / Bd * Bd;
  const int count = some ? cdiv(end - start, Bd) : 0;
  const RowWalk all = {first, start, start, end, count * group};
  Ring<Source<cols>> ring = {shared.ring, {weights, values, round, heads, key, col, all}};
  ring.start();

  bool dead = false;
#pragma unroll 1
  for (int i = 0; i < group; ++i) {
    const int head = round.first_head + first + i;
    for (int row = start + threadIdx.x; row < end; row += threads)
      dead |= *lse.row(head / heads, head % heads, row) == -infinity;
  }
  dead = __syncthreads_or(dead);

  float sums[Wr / step][width / 8][4] = {};
#pragma unroll 1
  for (RowWalk rows = all; rows.left > 0; rows.advance()) {
    Slice<cols>& slice = ring.next().template as<Slice<cols>>();
    const bool careful =
        dead || !all_see(rows.row, Bd, key, Br, M, N, causal_offset, window_offset);
    if (careful && __syncthreads_or(has_nonfinite(slice.values))) {
      const int head = round.first_head + rows.local_head;
      clear_dead(slice.values, lse, head / heads, head % heads, rows.row, M);
      __syncthreads();  // the zeros are there
      const Pairs pairs = {rows.row, key, M, N, causal_offset, window_offset};
      multiply_visible<true>(sums, slice.weights, slice.values, Own(width), pairs, own_lane());
    } else {
      multiply_tiles<true>(sums, slice.weights, slice.values, Own(width), own_lane());
    }
    ring.done();
  }
  Own own(width);
  own.col += col;
  const int kv_heads = heads / group, kv_head = round.first_head / group + local_kv_head;
  store_gradient<cols>(gradient, sums, factor, own, kv_head / kv_heads, kv_head % kv_heads, key, N,
                       own_lane());
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_slices_backward_columns(
    Tensor<const operand> Q, Tensor<const operand> dO, Tensor<const real> lse, const operand* P,
    const operand* dS, Tensor<scalar> dK, Tensor<scalar> dV, int M, int N, int heads, int group,
    int first_head, int first_key, int stride, int causal_offset, int window_offset, real scale) {
  Shared& shared = shared_memory<Shared>();
  constexpr int value_tiles = cdiv(dv, tile_width<dv>),
                tiles = value_tiles + cdiv(d, tile_width<d>);
  const int key_tiles = max(cdiv(min(N - first_key, stride), Br), 1);
  const auto [tile, key_tile, kv_head] = place(blockIdx.x, tiles, key_tiles);
  const int key = first_key + key_tile * Br;
  const Round round = {first_head, first_key, stride, M};
  const bool of_values = tile < value_tiles;
  if constexpr (d == dv) {
    sum_tile<d>(shared, of_values ? P : dS, of_values ? dO : Q, lse, of_values ? dV : dK, round,
                heads, group, kv_head, key, tile % value_tiles * tile_width<d>, N, causal_offset,
                window_offset, of_values ? 1 : scale);
  } else if (of_values) {
    sum_tile<dv>(shared, P, dO, lse, dV, round, heads, group, kv_head, key, tile * tile_width<dv>,
                 N, causal_offset, window_offset, 1);
  } else {
    sum_tile<d>(shared, dS, Q, lse, dK, round, heads, group, kv_head, key,
                (tile - value_tiles) * tile_width<d>, N, causal_offset, window_offset, scale);
  }
}
