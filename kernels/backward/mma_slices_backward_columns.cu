// mma_slices_backward_columns: computes dV = P^T dO and dK = dS^T Q for a round of heads and keys.
//
// A block owns a tile of dV or dK and loops over the rows that see its keys, in all query heads of
// the group, in slices of Bd rows.
//
//   Q, dO [batch, heads, M, d | dv]    dK, dV [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   P, dS: [heads of the round, M, stride], see gradient_slices.cuh
//   grid (max(cdiv(keys of the round, Br), 1) * (tiles of dv + tiles of d) * kv_heads of the round)
//   block (32 * Br * Bc / (Wr * Wc))
//   the host sets: scalar, result, operand, real, Br, Bc, Wr, Wc, Bd, stages, room, d, dv, threads,
//   shared_bytes and options (extent.cuh)
#include <attention/extent.cuh>
#include <backward/parts/all_finite.cuh>
#include <backward/parts/gradient_slices.cuh>
#include <backward/parts/row_range.cuh>
#include <backward/parts/store_gradient.cuh>
#include <backward/parts/tile_products.cuh>
#include <tile/own_lane.cuh>

using Tiles = Slices<threads, Br, Bc, Wr, Wc, Bd, stages>;
using Stage = Tiles::Stage;
using Own = Tiles::Own;
template <int cols>
constexpr int own_width = Tiles::own_width<cols>;
template <int cols>
constexpr int tile_width = Tiles::tile_width<cols>;

struct Shared {
  Stage ring[stages];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

template <int cols>
struct Slice {
  operand left[Bd][Br];
  operand right[Bd][tile_width<cols>];
};

// Iterates over row slices, one head after the other.
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
  const operand* left;
  Tensor<const operand> right;
  Round round;
  int heads, key, col;
  RowWalk rows;

  __device__ __forceinline__ void begin(Stage& stage) {
    if (rows.left <= 0) return;
    Slice<cols>& to = stage.as<Slice<cols>>();
    const int from = opaque(key) - round.first_key, head = round.first_head + rows.local_head;
    copy_tile<threads, Br, false>(to.left, round.of(left, rows.local_head), rows.row, from,
                                  round.stride - from);
    copy_tile<threads, tile_width<cols>, cols % tile_width<cols> == 0>(
        to.right, Head(right, head / heads, head % heads, round.M), rows.row, col, cols - col);
    rows.advance();
  }
};

// Recomputes dK or dV of the warp's keys from only the rows that see each key, because 0 times an
// infinity or NaN of another row is NaN.
template <int cols>
__device__ void repair(Tensor<result> gradient, const operand* left, Tensor<const operand> right,
                       Tensor<const real> lse, const Extent& extent, const Round& round, int heads,
                       int group, int local_kv_head, int first_key, int first_col, float factor) {
  const int kv_heads = heads / group, kv_head = round.first_head / group + local_kv_head;
#pragma unroll 1
  for (int i = threadIdx.x % warp_size; i < Wr * own_width<cols>; i += warp_size) {
    const int key = first_key + i / own_width<cols>, col = first_col + i % own_width<cols>;
    if (key >= extent.N || col >= cols) continue;
    float sum = 0;
#pragma unroll 1
    for (int local = local_kv_head * group; local < (local_kv_head + 1) * group; ++local) {
      const int head = round.first_head + local;
      const Head rows = round.of(left, local);
#pragma unroll 1
      for (int row = row_begin(extent, key); row < row_end(extent, key, 1); ++row) {
        if (*lse.row(head / heads, head % heads, row) == -infinity ||
            !extent_of_head(extent, head % heads).sees(row, key))
          continue;
        sum += float(rows.row<1>(row)[key - round.first_key]) *
               float(right.row(head / heads, head % heads, row)[col]);
      }
    }
    gradient.row(kv_head / kv_heads, kv_head % kv_heads, key)[col] = result(sum * factor);
  }
}

template <int cols>
__device__ __forceinline__ void sum_tile(Shared& shared, const operand* left,
                                         Tensor<const operand> right, Tensor<const real> lse,
                                         Tensor<result> gradient, const Extent& extent,
                                         const Round& round, int heads, int group,
                                         int local_kv_head, int key, int col, float factor) {
  constexpr int width = own_width<cols>;
  const int first = local_kv_head * group;
  const int start = row_begin(extent, key) / Bd * Bd, end = row_end(extent, key, Br);
  const bool some = key < extent.N && row_begin(extent, key) < end;
  const int count = some ? cdiv(end - start, Bd) : 0;
  const RowWalk all = {first, start, start, end, count * group};
  Ring<Source<cols>, Stage, stages> ring = {shared.ring,
                                            {left, right, round, heads, key, col, all}};
  ring.start();

  float sums[Wr / step][width / 8][4] = {};
#pragma unroll 1
  for (RowWalk rows = all; rows.left > 0; rows.advance()) {
    timeline::event(timeline::tile, key, rows.row);
    Slice<cols>& slice = ring.next().template as<Slice<cols>>();
    multiply_tiles<true>(sums, slice.left, slice.right, Own(width), own_lane());
    ring.done();
  }
  Own own(width);
  own.col += col;
  if (!all_finite(sums)) {
    repair<cols>(gradient, left, right, lse, extent, round, heads, group, local_kv_head,
                 key + own.row, own.col, factor);
    return;
  }
  const int kv_heads = heads / group, kv_head = round.first_head / group + local_kv_head;
  store_gradient<cols>(sums, factor, gradient, kv_head / kv_heads, kv_head % kv_heads,
                       key + own.row, extent.N, own_lane(), own.col);
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_slices_backward_columns(
    Tensor<const operand> Q, Tensor<const operand> dO, Tensor<const real> lse, const operand* P,
    const operand* dS, Tensor<result> dK, Tensor<result> dV, Sizes sizes, int heads, int group,
    int first_head, int first_key, int stride, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  constexpr int value_tiles = cdiv(dv, tile_width<dv>),
                tiles = value_tiles + cdiv(d, tile_width<d>);
  const int key_tiles = max(cdiv(min(sizes.N - first_key, stride), Br), 1);
  const auto [tile, key_tile, kv_head] = place(blockIdx.x, tiles, key_tiles);
  const int key = first_key + key_tile * Br;
  const Extent extent = extent_of(sizes, mods, (first_head + kv_head * group) / heads, 0);
  const Round round = {first_head, first_key, stride, extent.M};
  const bool of_values = tile < value_tiles;
  if constexpr (d == dv) {
    sum_tile<d>(shared, of_values ? P : dS, of_values ? dO : Q, lse, of_values ? dV : dK, extent,
                round, heads, group, kv_head, key, tile % value_tiles * tile_width<d>,
                of_values ? extent.kept_factor() : scale);
  } else if (of_values) {
    sum_tile<dv>(shared, P, dO, lse, dV, extent, round, heads, group, kv_head, key,
                 tile * tile_width<dv>, extent.kept_factor());
  } else {
    sum_tile<d>(shared, dS, Q, lse, dK, extent, round, heads, group, kv_head, key,
                (tile - value_tiles) * tile_width<d>, scale);
  }
}
