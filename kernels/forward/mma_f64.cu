// mma_f64: float64 on tensor cores, whose FP64 instructions are IEEE 754 fused multiply-adds.
//
// A lane loads two neighbouring columns of K, 16 bytes, without ldmatrix. This permutes the terms
// of a sum: fragment indices c and c + 4 stand for columns 2c and 2c + 1 of Q and K, and for keys
// 2c and 2c + 1 of P and V. P then becomes an operand without shuffles. Q is stored in shared
// memory in operand order. Accumulators take twice as many registers as in float, so `mma_f64_wide`
// is launched instead if d or dv is above 128.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   grid (cdiv(M * pack_gqa, Br) * heads / pack_gqa * batch)    block (2 * Br)
//   the host sets: scalar, result, operand, real, Br, Bc, stages, pack_gqa, d, dv, threads,
//   shared_bytes and options (extent.cuh)
#include <attention/exp2_f64.cuh>
#include <attention/finish_rows.cuh>
#include <attention/nonfinite.cuh>
#include <attention/row_softmax.cuh>
#include <attention/score.cuh>
#include <attention/store_rows.cuh>
#include <attention/tile_index.cuh>
#include <attention/tile_mask.cuh>
#include <forward/parts/f64_tiles.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/opaque.cuh>
#include <tile/f64_fragments.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>
#include <timeline.cuh>

constexpr int depth = cdiv(d, step) * step;   // columns of Q and K, padded with zeros
constexpr int width = cdiv(dv, step) * step;  // columns of V and O
using OwnRows = Rows<step, pack_gqa>;

struct Shared {
  double2 Q[Br / step][depth / step][4][warp_size];  // pairs: rows r and r + 8 of a column
  operand K[stages][Bc][depth];
  operand V[stages][Bc][width];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(sizeof(operand) == 8, "these tensor-core products take float64");
static_assert(threads == warp_size * Br / step, "each warp owns 16 rows");
static_assert(Br % step == 0 && Bc % step == 0, "tiles are multiples of the MMA shape");

// State of a warp in the main loop over tiles of keys.
struct Task : KeyTiles {
  Shared& shared;
  Scorer<real> scorer;
  Head keys, values;
  int rows, lane;
  int end;  // end of the keys that are visible to any row of the block
};

__device__ __forceinline__ void load_values(operand (&V)[Bc][width], const Head& values,
                                            int first_key) {
  copy_tile<threads, width, width == dv>(V, values, first_key, 0, dv);
}

// S = Q K^T for the warp's rows.
__device__ __forceinline__ void multiply_scores(const Task& task, operand (&K)[Bc][depth],
                                                Fragments<step, Bc>& S) {
  const timeline::Phase phase(timeline::products);
  const AlongRows<depth> keys(K, 0, task.lane);
#pragma unroll 2
  for (int k = 0; k < depth / step; ++k) {
    double a[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const double2 pair = task.shared.Q[task.rows][k][i][task.lane];
      a[2 * i] = pair.x, a[2 * i + 1] = pair.y;
    }
#pragma unroll
    for (int n = 0; n < Bc / 8; ++n) {
      double b[4];
      keys.load(b, n * 8, k);
      multiply_add_f64(S[0][n], a, b);
    }
  }
}

// Computes P = exp(S - maximum) and O += P V. P of 16 keys is one operand, computed right before
// its product, so that the exponentials of some keys overlap with the products of others.
__device__ __forceinline__ void multiply_output(const Task& task, operand (&V)[Bc][width],
                                                Fragments<step, Bc>& S, Fragments<step, width>& O,
                                                OwnRows& rows, int first_key) {
  const timeline::Phase phase(timeline::products);
  const DownColumns<width> values(V, 0, task.lane);
  real sum[1][2] = {};
#pragma unroll
  for (int k = 0; k < Bc / step; ++k) {
    exponentiate(S, 2 * k, rows, sum);
    exponentiate(S, 2 * k + 1, rows, sum);
    for_dropped(S, k, k + 1, rows, first_key, [&](int i, int j, int e) { S[i][j][e] = 0; });
    double a[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] = S[0][2 * k + i / 4][i % 2 * 2 + i / 2 % 2];
#pragma unroll
    for (int n = 0; n < width / 8; ++n) {
      double b[4];
      values.load(b, k, n);
      multiply_add_f64(O[0][n], a, b);
    }
  }
  rows.add(sum);
}

// Processes one tile of keys: S = Q K^T, P = softmax(S), O += P V. On entry the tile's K has
// arrived, and with two buffers its V as well; on exit the same holds for the next tile. `masked`
// is false if every row sees every key of the tile.
template <bool masked>
__device__ __forceinline__ void attend(const Task& task, int first_key, int buffer,
                                       Fragments<step, width>& O, OwnRows& rows) {
  Shared& shared = task.shared;
  const bool more = task.after<Bc>(first_key) < task.end,
             seen = !masked || first_key < rows.extent.kv_end((rows.row(0, 1) | 7) / pack_gqa);
  if (stages == 1) load_values(shared.V[0], task.values, first_key);
  if (stages == 2 && more) {
    copy_rows<threads, d>(shared.K[1 - buffer], task.keys, first_key + task.stride<Bc>(first_key));
    load_values(shared.V[1 - buffer], task.values, first_key + task.stride<Bc>(first_key));
  }
  cp_async_commit_group();
  Fragments<step, Bc> S = {};
  if (seen) multiply_scores(task, shared.K[buffer], S);
  if (stages == 1) {
    cp_async_wait_group<0>();
    __syncthreads();  // V has arrived, and K is no longer read
    if (more) copy_rows<threads, d>(shared.K[0], task.keys, first_key + task.stride<Bc>(first_key));
    cp_async_commit_group();
  }
  if (seen) {
    task.scorer.apply(S, rows, first_key, task.is_full<Bc>(first_key));
    rescale<masked>(S, O, rows, first_key, task.lane);
    multiply_output(task, shared.V[buffer], S, O, rows, first_key);
  }
  cp_async_wait_group<0>();
  __syncthreads();  // the next K has arrived, and this tile is no longer read
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_f64(
    Tensor<const operand> Q, Tensor<const operand> K, Tensor<const operand> V, Tensor<result> O,
    Tensor<real> lse, Sizes sizes, int heads, int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const auto [tile, head, batch] =
      place_of_rows<Br, pack_gqa>(blockIdx.x, sizes, mods, heads / pack_gqa);
  const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
  const int own_row = warp * step;
  const Extent extent = extent_of(sizes, mods, batch, head * pack_gqa);
  const int first_row = (cdiv(extent.M * pack_gqa, Br) - 1 - tile) * Br;  // longest tile first
  if (!extent.has_tile_of_rows(first_row / pack_gqa)) return;
  const Scorer<real> scorer = {scale, mods};
  const int kv_head = head * pack_gqa / group;
  const Head queries(Q, batch, head * pack_gqa, extent.M * pack_gqa);
  Head keys(K, batch, kv_head, extent.N), values(V, batch, kv_head, extent.N);
  const int first_query = first_row / pack_gqa;
  const int last_query = (min(first_row + Br, extent.M * pack_gqa) - 1) / pack_gqa;
  const auto map = extent.key_tiles(first_row / Br);
  const int start = map.from<Bc>(extent.kv_begin(first_query) / Bc * Bc);  // first visible tile

  copy_rows<threads, d>(shared.K[0], keys, start);
  if (stages == 2) load_values(shared.V[0], values, start);
  cp_async_commit_group();
  load_queries<threads, pack_gqa, d>(shared.Q, queries, first_row);
  cp_async_wait_group<0>();
  __syncthreads();  // Q and the first tile have arrived
  Fragments<step, width> sums = {};
  OwnRows rows(first_row + own_row + lane / 4, extent, scorer.scale2());
  keys.aligned = values.aligned = keys.aligned && values.aligned;  // saves a register
  const int end = extent.kv_end(last_query);
  const Task task = {map, shared, scorer, keys, values, warp, lane, end};
  int buffer = 0;
  for (int first_key = start; first_key < end; first_key = task.after<Bc>(first_key)) {
    timeline::event(timeline::tile, first_key, first_query);
    if (is_masked(extent, first_query, last_query + 1 - first_query, first_key, Bc))
      attend<true>(task, first_key, buffer, sums, rows);
    else
      attend<false>(task, first_key, buffer, sums, rows);
    buffer = stages - 1 - buffer;
  }
  // Recomputes the block's position, so that it occupies no registers during the loop.
  const Place same =
      place_of_rows<Br, pack_gqa>(opaque(int(blockIdx.x)), sizes, mods, heads / pack_gqa);
  if (needs_repair(sums, rows))
    return repair_rows<d, dv, true>(Q, K, V, O, lse, rows, same.batch, same.head,
                                    same.head * pack_gqa / group, scorer);
  finish_rows(sums, rows, lse, same.batch, same.head, lane);
  store_rows<dv>(sums, rows, O, same.batch, same.head, lane);
}
