// mma_split_kv: `mma_pipelined`, with the keys of a tile of Q split among several blocks.
//
// With few queries there are few tiles of Q, and most multiprocessors would be idle. Here several
// blocks process one split of the keys each, and merge_splits combines their results; a single
// split writes O and lse itself (Flash-Decoding). A ring of `stages` tiles of K and V keeps enough
// loads in flight. A tile of few rows would occupy one warp, so `key_warps` warps share its keys.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   O_splits [batch, heads, M, most_splits, stored_width]
//   max_splits, sum_splits [batch, heads, M, most_splits]
//   grid (cdiv(M * pack_gqa, Br) * planned * heads / pack_gqa * batch; see split_order.cuh)
//   block (32 * Br / Wr * key_warps)
//   the host sets: scalar, result, operand, real, Br, Bc, Wr, stages, pack_gqa, key_warps, d, dv,
//   threads, shared_bytes and options (extent.cuh)
#include <attention/finish_rows.cuh>
#include <attention/nonfinite.cuh>
#include <attention/key_head.cuh>
#include <attention/row_softmax.cuh>
#include <attention/score.cuh>
#include <attention/store_rows.cuh>
#include <attention/tile_mask.cuh>
#include <forward/parts/split_order.cuh>
#include <forward/parts/stored_products.cuh>
#include <forward/parts/warp_split_kv.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/dependent_launch.cuh>
#include <ptx/mma.cuh>
#include <ptx/opaque.cuh>
#include <tile/async_copy.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>
#include <timeline.cuh>

constexpr int whole = step * in_operand;
constexpr int depth = cdiv(d, whole) * whole;        // columns of Q and K, padded with zeros
constexpr int width = cdiv(dv, whole) * whole;       // columns of V and O
constexpr int stored_width = cdiv(dv, step) * step;  // columns of O_splits
constexpr int Wc = Bc / key_warps;                   // keys per warp in each tile
// merge_splits has one block per row. With at most this many rows it is launched early (PDL).
constexpr int few_rows = 256;
using OwnRows = Rows<Wr, pack_gqa>;

struct Shared {
  operand Q[Br][depth < width ? width : depth];  // reused for O in the epilogue
  operand K[stages][Bc][depth / in_operand];
  operand V[stages][Bc][width / in_operand];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads == warp_size * Br / Wr * key_warps, "each warp owns Wr rows and Wc keys");
static_assert(stages >= 2, "the next tile is loaded while this one is multiplied");
static_assert(Wr % step == 0 && Bc % (step * key_warps) == 0, "tiles are multiples of MMA tiles");

using OwnSums = WarpSums<Wr / step, width / 8>;
static_assert(Br / Wr * key_warps * sizeof(OwnSums) <= sizeof(Shared::K) + sizeof(Shared::V) ||
                  key_warps == 1,
              "warps' sums reuse the memory of K and V");

// A split: keys start … end - 1. The lengths of splits differ by at most one tile.
struct Split {
  int first_key, end;

  __device__ Split(int start, int end, int split, int num_splits) {
    const int tiles = cdiv(max(0, end - start), Bc), less = tiles / num_splits,
              rest = tiles % num_splits;
    first_key = start + (split * less + min(split, rest)) * Bc;
    this->end = min(end, first_key + (less + (split < rest)) * Bc);
  }
};

// State of a warp in the main loop over tiles of keys.
struct Task {
  Shared& shared;
  Scorer<real> scorer;
  KeyHead keys, values;
  Scaling<Mods> scales;
  int own_row, own_key, lane;
  int end;  // end of the split's keys
};

// Starts copying a tile of K and V if it belongs to the split.
__device__ __forceinline__ void copy_keys(const Task& task, int first_key, int buffer) {
  if (first_key < task.end) {
    copy_rows<threads, d / in_operand>(task.shared.K[buffer], task.keys, first_key);
    copy_rows<threads, dv / in_operand>(task.shared.V[buffer], task.values, first_key);
  }
  cp_async_commit_group();
}

// Processes the warp's keys of one tile: S = Q K^T, P = softmax(S), O += P V. `masked` is false if
// every row sees all of these keys.
template <bool masked>
__device__ __forceinline__ void attend(const Task& task, int first_key, int buffer,
                                       Fragments<Wr, width>& O, OwnRows& rows) {
  Shared& shared = task.shared;
  // The warp's last row has the largest kv_end: no row of the warp sees a tile beyond it.
  const int last_row = rows.row(Wr / step - 1, 1) | 7;
  const bool seen = !masked || first_key < rows.extent.kv_end(last_row / pack_gqa);
  cp_async_wait_group<stages - 2>();
  __syncthreads();  // this tile has arrived, and the previous one is no longer read
  copy_keys(task, first_key + (stages - 1) * Bc, buffer == 0 ? stages - 1 : buffer - 1);
  if (!seen) return;
  const int first = first_key + task.own_key;
  Fragments<Wr, Wc> S = {};
  multiply_stored_scores(shared.Q, keys_from<Wc>(shared.K[buffer], task.own_key), S, task.own_row,
                         task.lane, task.scales, task.keys, first);
  task.scorer.apply(S, rows, first);
  rescale<masked>(S, O, rows, first, task.lane);
  multiply_stored_output(keys_from<Wc>(shared.V[buffer], task.own_key), S, O, rows, first,
                         task.lane, task.scales, task.values);
}

// Writes results of the warp's rows for merge_splits: maxima, sums relative to them, undivided O.
__device__ void store_split(const Fragments<Wr, width>& O, const OwnRows& rows, float* O_splits,
                            float* max_splits, float* sum_splits, int split, int most, int batch,
                            int head, int heads, int all_rows, int lane) {
  const timeline::Phase phase(timeline::epilogue);
  const int M = rows.extent.M, stored = ragged ? all_rows : M;  // rows per head
#pragma unroll
  for (int i = 0; i < 2 * (Wr / step); ++i) {
    const int row = rows.row(i / 2, i % 2);
    float sum = rows.sum[i / 2][i % 2];
    sum += __shfl_xor_sync(full_warp, sum, 1);
    sum += __shfl_xor_sync(full_warp, sum, 2);
    if (row >= M * pack_gqa) continue;
    const long long first = (long long)(batch * heads + head * pack_gqa + row % pack_gqa) * stored;
    const long long place = (first + row / pack_gqa) * most + split;
    if (lane % 4 == 0) {
      max_splits[place * stored_maxima] = rows.maximum[i / 2][i % 2];
      if (has_row_max) max_splits[place * stored_maxima + 1] = rows.row_max(i);
      sum_splits[place] = sum;
    }
    float* to = O_splits + place * stored_width + 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < stored_width / 8; ++n) {
      *reinterpret_cast<float2*>(to + n * 8) = {O[i / 2][n][i % 2 * 2], O[i / 2][n][i % 2 * 2 + 1]};
    }
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_split_kv(
    Tensor<const operand> Q, StoredKeys K, StoredValues V, Tensor<result> O, Tensor<real> lse,
    float* O_splits, float* max_splits, float* sum_splits, int planned, Sizes sizes, int heads,
    int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const int tiles = cdiv(sizes.M * pack_gqa, Br);
  if (!balances && gridDim.x / (tiles * planned) * 1LL * sizes.M * pack_gqa <= few_rows)
    launch_dependents();
  Place own = place(blockIdx.x, tiles * planned, heads / pack_gqa);
  const int num_splits = splits_of(planned, own, tiles, heads / pack_gqa, sizes, mods);
  const auto [index, head, batch] = own;
  // Reversed order: the longest tiles first. Blocks that read the same keys are adjacent.
  const int first_row = (tiles - 1 - index % tiles) * Br;
  const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
  const int own_row = warp / key_warps * Wr, key_warp = warp % key_warps;
  if (!balances) wait_for_launch_before();
  const Extent extent = extent_of(sizes, mods, batch, head * pack_gqa);
  if ((balances && num_splits == 0) || !extent.has_tile_of_rows(first_row / pack_gqa)) return;
  const Scorer<real> scorer = {scale, mods};
  const int kv_head = head * pack_gqa / group;
  const Head queries(Q, batch, head * pack_gqa, extent.M * pack_gqa);
  KeyHead keys(K, mods, batch, kv_head, extent.N), values(V, mods, batch, kv_head, extent.N);
  const int first_query = first_row / pack_gqa;
  const int last_query = (min(first_row + Br, extent.M * pack_gqa) - 1) / pack_gqa;
  const int start = extent.kv_begin(first_query) / Bc * Bc;  // first visible tile
  const Split split(start, extent.kv_end(last_query), index / tiles, num_splits);

  copy_tile<threads, depth, d == depth, pack_gqa>(shared.Q, queries, first_row, 0, d);
  cp_async_commit_group();
  keys.aligned = values.aligned = keys.aligned && values.aligned;  // saves a register
  const Task task = {shared,  scorer,        keys, values,   {mods, batch, kv_head},
                     own_row, key_warp * Wc, lane, split.end};
#pragma unroll 1
  for (int i = 0; i < stages - 1; ++i) copy_keys(task, split.first_key + i * Bc, i);
  Fragments<Wr, width> sums = {};
  OwnRows rows(first_row + own_row + lane / 4, extent, scorer.scale2(),
               index / tiles == 0 && key_warp == 0);
  int buffer = 0;
  for (int first_key = split.first_key; first_key < split.end; first_key += Bc) {
    timeline::event(timeline::tile, first_key, first_query);
    if (is_masked(extent, first_query, last_query + 1 - first_query, first_key, Bc))
      attend<true>(task, first_key, buffer, sums, rows);
    else
      attend<false>(task, first_key, buffer, sums, rows);
    buffer = buffer == stages - 1 ? 0 : buffer + 1;
  }
  cp_async_wait_group<0>();
  __syncthreads();  // Q is no longer read, and its copy has completed
  if constexpr (key_warps > 1) {
    OwnSums* all = reinterpret_cast<OwnSums*>(shared.K) + warp / key_warps * key_warps;
    add_up<key_warps>(all, key_warp, sums, rows, lane);
    if (key_warp > 0) return;
  }
  // Recomputes the block's position, so that it occupies no registers during the loop.
  const int same_tiles = cdiv(opaque(sizes.M) * pack_gqa, Br);
  const Place same =
      balances ? own : place(opaque(int(blockIdx.x)), same_tiles * planned, heads / pack_gqa);
  const int row = (same_tiles - 1 - same.tile % same_tiles) * Br;
  finish_stored(task.scales, sums, lane);
  if (num_splits > 1) {
    store_split(sums, rows, O_splits, max_splits, sum_splits, same.tile / same_tiles,
                balances ? most_splits : num_splits, same.batch, same.head, heads, sizes.M, lane);
    return;
  }
  if (needs_repair(sums, rows)) {
    repair_rows<d, dv, true>(Q, rows_of(K, mods), rows_of(V, mods), O, lse, rows, same.batch,
                             same.head, same.head * pack_gqa / group, scorer);
    return;
  }
  finish_rows(sums, rows, lse, same.batch, same.head, lane);
  if constexpr (sizeof(result) == sizeof(operand))
    store_output<dv, pack_gqa>(shared.Q, sums, O, same.batch, same.head, row, extent.M, own_row,
                               lane);
  else
    store_rows<dv>(sums, rows, O, same.batch, same.head, lane);
}
