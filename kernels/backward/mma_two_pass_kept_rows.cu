// mma_two_pass_kept_rows: computes dQ = dS K, with dS that mma_two_pass_columns kept in memory.
//
// Nothing is computed twice. Each block owns `rows` rows and loops over tiles of `keys` keys, of
// which copies of K and dS are in flight in `stages` stages. Squares of dS are stored as operands,
// so a lane loads the 16 bytes of each at once.
//
//   Q, dO, dQ [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]
//   lse, delta [batch, heads, M]    dS: query heads from first_head on, see kept_squares.cuh
//   grid (cdiv(M, rows) * heads of the round)    block (32 * warps)
//   the host sets: scalar, result, operand, real, Br, Bc, rows, keys, warps, stages, d, dv,
//   threads, shared_bytes and options (extent.cuh)
#include <attention/extent.cuh>
#include <backward/parts/cold_path.cuh>
#include <backward/parts/kept_squares.cuh>
#include <backward/parts/longest_first.cuh>
#include <backward/parts/mma_gradients.cuh>
#include <backward/parts/repair_rows.cuh>
#include <backward/parts/store_gradient.cuh>
#include <backward/parts/tile_products.cuh>
#include <backward/parts/warp_partition.cuh>
#include <tile/own_lane.cuh>
#include <tile/shared.cuh>

constexpr int depth = cdiv(d, step) * step;  // columns of the K tiles, zero-padded

struct Stage {
  operand K[keys][depth];
  uint4 dS[rows / step][keys / step][warp_size];
};
struct Shared {
  Stage ring[stages];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(rows % step == 0 && keys % step == 0, "tiles are made of whole products");

constexpr int blocks_per_sm = 8 / warps > 1 ? 8 / warps : 1;  // as registers permit

using Own = WarpPartition<rows, depth, warps>;

// Copies K and dS of one block.
struct Source {
  KeptSquares<Br, Bc> kept;
  Tensor<const operand> K;
  const Extent& extent;
  int local_head, batch, kv_head, first_row, key, end;

  // Returns whether the first pass has computed the tile of dS of a square.
  __device__ __forceinline__ bool has(int row_tile, int key_tile) const {
    const int row = row_tile * Br;
    return row < extent.M && key_tile * Bc < extent.kv_end(min(row + Br, extent.M) - 1);
  }
  // Starts the copies of the next tile, if there is one.
  __device__ __forceinline__ void begin(Stage& stage) {
    if (key < end) {
      copy_rows<threads, d>(stage.K, Head(K, opaque(batch), opaque(kv_head), extent.N), key);
      constexpr int squares = rows / step * (keys / step);
#pragma unroll
      for (int turn = 0; turn < cdiv(squares, warps); ++turn) {
        const int square = int(threadIdx.x) / warp_size + turn * warps;
        const int i = square / (keys / step), j = square % (keys / step);
        if (squares % warps != 0 && square >= squares) break;
        const int row = first_row + i * step, from = key + j * step;
        const bool present = has(row / Br, from / Bc);
        const int tile = present ? kept.tile(local_head, row / Br, from / Bc) : 0;
        const int lane = threadIdx.x % warp_size;
        cp_async(&stage.dS[i][j][lane], kept.chunk(tile, row % Br / step, from % Bc / step, lane),
                 present ? 16 : 0);
      }
      key += keys;
    }
    cp_async_commit_group();
  }
};

// Computes dQ += dS K for one tile.
__device__ __forceinline__ void multiply_stage(Own::Sums& dQ, Stage& stage, const Own& own,
                                               int lane) {
  const timeline::Phase phase(timeline::products);
#pragma unroll
  for (int k = 0; k < keys / step; ++k) {
    unsigned a[Own::rows / step][4];
#pragma unroll
    for (int i = 0; i < Own::rows / step; ++i) {
      const uint4 square = stage.dS[own.row / step + i][k][lane];
      a[i][0] = square.x, a[i][1] = square.y, a[i][2] = square.z, a[i][3] = square.w;
    }
    multiply_step(dQ, a, own, [&](unsigned (&b)[4], int n) {
      const int chunk = own.col / 8 + 2 * n + lane / 16;
      ldmatrix_trans(b, at(stage.K, lane % 16, chunk, k * step));
    });
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_two_pass_kept_rows(
    Tensor<const operand> Q, Tensor<const operand> K, Tensor<const operand> V,
    Tensor<const operand> dO, Tensor<const real> lse, Tensor<const real> delta, operand* dS,
    Tensor<result> dQ, Sizes sizes, int heads, int group, int first_head, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const int row_tiles = cdiv(sizes.M, rows);
  const int block = longest_first(blockIdx.x, gridDim.x, row_tiles, blocks_per_sm);
  const int local_head = block / row_tiles, index = first_head + local_head;
  const int head = index % heads, batch = index / heads;
  const Extent extent = extent_of(sizes, mods, batch, head);
  // Reversed order: under a causal mask the longest row tiles start first.
  const int first_row = (row_tiles - 1 - block % row_tiles) * rows;
  const int end = extent.kv_end(min(first_row + rows, extent.M) - 1);
  Source source = {{dS, sizes}, K, extent, local_head, batch, head / group, first_row, 0, end};
#pragma unroll
  for (int stage = 0; stage < stages - 1; ++stage) source.begin(shared.ring[stage]);
  const Own own;
  const int lane = own_lane();
  Own::Sums sums = {};
  int stage = 0;
#pragma unroll 1
  for (int first_key = 0; first_key < end; first_key += keys) {
    timeline::event(timeline::tile, first_key, first_row);
    cp_async_wait_group<stages - 2>();
    __syncthreads();  // the tile has arrived; all warps are done with the one before
    source.begin(shared.ring[stage == 0 ? stages - 1 : stage - 1]);
    multiply_stage(sums, shared.ring[stage], own, lane);
    stage = stage == stages - 1 ? 0 : stage + 1;
  }
  const int first = first_row + own.row;
  if (all_finite(sums)) {
    store_gradient<d>(sums, scale, dQ, batch, head, first, extent.M, lane, own.col);
  } else {
    const StatsInMemory stats = {lse, delta, batch};
    const Repair<d, dv, operand, StatsInMemory> repair = {
        extent, Q, K, V, dO, stats, {scale, mods}, batch, head / group};
    call_cold_path([=, col = own.col] {
      repair_rows<Own::cols>(repair, dQ, head, first, first + Own::rows, col, col + Own::cols);
    });
  }
}
