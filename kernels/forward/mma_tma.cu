// mma_tma: `mma_async` with copies by the tensor memory accelerator (TMA), for sm_90 and later.
//
// One thread asks the copy engine for whole tiles; the other threads compute no addresses and issue
// no copies. The engine swizzles the chunks of a tile and writes zeros past the ends of the tensor.
// mbarriers in shared memory replace the barrier of the block: a `full` barrier completes when all
// bytes of a tile have arrived, an `empty` barrier when every warp has read it. A warp waits for
// data, not for other warps; only the warp that asks for a tile waits until its stage is empty.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   grid (cdiv(M, Br) * heads * batch)    block (32 * Br / Wr): each warp owns Wr rows
//   the host sets: scalar, result, real, Br, Bc, Wr, stages, d, dv, threads, shared_bytes and
//   options (extent.cuh)
#include <attention/finish_rows.cuh>
#include <attention/nonfinite.cuh>
#include <attention/row_softmax.cuh>
#include <attention/row_tile.cuh>
#include <attention/score.cuh>
#include <attention/store_rows.cuh>
#include <attention/tile_index.cuh>
#include <attention/tile_mask.cuh>
#include <ptx/mma.cuh>
#include <ptx/proxy_fence.cuh>
#include <tile/pipeline.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>
#include <timeline.cuh>

constexpr int depth = cdiv(d, step) * step;   // columns of Q and K, padded with zeros
constexpr int width = cdiv(dv, step) * step;  // columns of V and O
constexpr int warps = Br / Wr;

using Queries = TmaTile<scalar, Br, d>;
using Keys = TmaTile<scalar, Bc, d>;
using Values = TmaTile<scalar, Bc, dv>;

struct Shared {
  Queries Q;
  Keys K[stages];
  Values V[stages];
  Barrier Q_full;
  Pipeline<stages> pipeline;
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(sizeof(scalar) == 2, "these tensor-core products take 16-bit numbers");
static_assert(threads == warp_size * warps, "each warp owns Wr rows");
static_assert(Wr % step == 0 && Bc % step == 0, "tiles are multiples of the MMA shape");
static_assert(stages >= 2, "the next tile arrives while warps read this one");

// Runs in one thread, before the others use the barriers.
__device__ __forceinline__ void init_barriers(Shared& shared) {
  init_barrier(shared.Q_full, 1);
  shared.pipeline.init(warps, 2);  // a stage is full after two loads, of K and of V
  fence_barrier_init();
}

// In one thread, waits until every warp has read what is in a stage, and starts copying a tile of K
// and V to it.
__device__ __forceinline__ void load_keys(Shared& shared, const PipelineState<stages>& to,
                                          const TensorMap& K, const TensorMap& V,
                                          const RowTile& tile, int first_key, int kv_head) {
  if (threadIdx.x != 0) return;
  Barrier& full = shared.pipeline.acquire(to);
  const int row = tile.packed_key(first_key), batch = tile.packed_batch(tile.batch);
  load_async(shared.K[to.stage], K, full, row, kv_head, batch);
  load_async(shared.V[to.stage], V, full, row, kv_head, batch);
}

// D += A B for 16 columns of A. load(b, j) loads B's fragments for columns 16 j to 16 j + 15.
template <int m, int n, class Load>
__device__ __forceinline__ void multiply_step(float (&D)[m][n][4], const unsigned (&a)[m][4],
                                              Load load) {
#pragma unroll
  for (int j = 0; j < n / 2; ++j) {
    unsigned b[4];
    load(b, j);
#pragma unroll
    for (int i = 0; i < 2 * m; ++i)  // every fragment of A with every fragment of B
      multiply_add<scalar>(D[i / 2][2 * j + i % 2], a[i / 2], b[i % 2 * 2], b[i % 2 * 2 + 1]);
  }
}

// S = Q K^T for the warp's rows and the tile's keys.
__device__ __forceinline__ void multiply_scores(Queries& Q, Keys& K, Fragments<Wr, Bc>& S,
                                                int first_row, int lane) {
  const timeline::Phase phase(timeline::products);
#pragma unroll
  for (int k = 0; k < depth / step; ++k) {
    unsigned a[Wr / step][4];  // rows 0-7, rows 8-15; then both for the next 8 columns
#pragma unroll
    for (int i = 0; i < Wr / step; ++i)
      ldmatrix(a[i], Q.at(first_row + i * step + lane % 16, 2 * k + lane / 16));
    multiply_step(S, a, [&](unsigned (&b)[4], int j) {  // 8 keys x 16 columns, then 8 more keys
      ldmatrix(b, K.at(j * step + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
    });
  }
}

// O += P V. Two adjacent accumulator fragments of P form one operand of this product.
__device__ __forceinline__ void multiply_output(Values& V, const Fragments<Wr, Bc>& P,
                                                Fragments<Wr, width>& O, int lane) {
  const timeline::Phase phase(timeline::products);
#pragma unroll
  for (int k = 0; k < Bc / step; ++k) {
    unsigned a[Wr / step][4];
#pragma unroll
    for (int i = 0; i < Wr / step * 4; ++i) {
      const float (&p)[4] = P[i / 4][2 * k + i % 4 / 2];  // keys 0-7, then keys 8-15
      a[i / 4][i % 4] = pack<scalar>(p[i % 2 * 2], p[i % 2 * 2 + 1]);
    }
    multiply_step(O, a, [&](unsigned (&b)[4], int j) {  // 16 keys x 8 columns, then 8 more columns
      ldmatrix_trans(b, V.at(k * step + lane % 16, 2 * j + lane / 16));
    });
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_tma(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, Tensor<const scalar> Q, Tensor<const scalar> K,
    Tensor<const scalar> V, Tensor<result> O, Tensor<real> lse, Sizes sizes, int heads, int group,
    real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  const auto [index, head, batch] = place_of_rows<Br>(blockIdx.x, sizes, mods, heads);
  const int lane = threadIdx.x % warp_size, own_row = threadIdx.x / warp_size * Wr;
  const int kv_head = head / group;
  const Extent extent = extent_of(sizes, mods, batch, head);
  const Scorer<real> scorer = {scale, mods};
  // Reversed order: under a causal mask the last rows have the most keys and should start first.
  const int row = (cdiv(extent.M, Br) - 1 - index) * Br;
  if (!extent.has_tile_of_rows(row)) return;
  const RowTile tile = row_tile<Br, Bc>(extent, row, head, batch);

  if (threadIdx.x == 0)
    load_async(shared.Q, Q_map, shared.Q_full, tile.packed_row(tile.row), head,
               tile.packed_batch(batch));
  PipelineState<stages> here;
  if (tile.kv_begin < tile.kv_end)
    load_keys(shared, here, K_map, V_map, tile, tile.kv_begin, kv_head);
  Fragments<Wr, width> sums = {};
  Rows<Wr> rows(tile.row + own_row + lane / 4, extent, scorer.scale2());
  wait(shared.Q_full, 0);
  for (int first_key = tile.kv_begin, next; first_key < tile.kv_end; first_key = next) {
    timeline::event(timeline::tile, first_key, tile.row);
    next = tile.after<Bc>(first_key);
    PipelineState<stages> ahead = here;
    ahead.advance();
    if (next < tile.kv_end) load_keys(shared, ahead, K_map, V_map, tile, next, kv_head);
    shared.pipeline.wait(here);  // this tile has arrived
    Fragments<Wr, Bc> S = {};
    multiply_scores(shared.Q, shared.K[here.stage], S, own_row, lane);
    scorer.apply(S, rows, first_key, tile.is_full<Bc>(first_key));
    if (is_masked(extent, tile.row, Br, first_key, Bc))
      rescale<true>(S, sums, rows, first_key, lane);  // also masks S
    else
      rescale<false>(S, sums, rows, first_key, lane);
    exponentiate(S, rows, first_key);
    multiply_output(shared.V[here.stage], S, sums, lane);
    fence_proxy_async();  // the next copy to this stage starts after these reads
    __syncwarp();         // all lanes have read this tile
    if (lane == 0) shared.pipeline.arrive(here);
    here.advance();
  }
  if (needs_repair(sums, rows)) {
    repair_rows<d, dv>(Q, K, V, O, lse, rows, batch, head, kv_head, scorer);
    return;
  }
  finish_rows(sums, rows, lse, batch, head, lane);
  store_rows<dv>(sums, rows, O, batch, head, lane);
}
