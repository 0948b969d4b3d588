// mma_pipelined: `mma_async`, rearranged to keep the tensor cores busy.
//
// Registers and shared memory limit the number of warps per multiprocessor, so K and V may have one
// buffer instead of two: V is then copied during S = Q K^T, and the next K during the softmax and
// O += P V. The exponentials of some keys overlap with the products of others. Warps skip tiles
// that are masked for all of their rows. Query heads that share a key head (GQA) are packed into
// one tile if the rows of one head would not fill it. O is stored through the shared memory of Q,
// in 16-byte chunks. An earlier launch rounds float32 inputs to the 16-bit type `operand`.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   grid (cdiv(M * pack_gqa, Br) * heads / pack_gqa * batch)    block (32 * Br / Wr)
//   the host sets: scalar, result, operand, real, Br, Bc, Wr, stages, pack_gqa, d, dv, threads,
//   shared_bytes and options (extent.cuh)
#include <attention/finish_rows.cuh>
#include <attention/nonfinite.cuh>
#include <attention/row_softmax.cuh>
#include <attention/score.cuh>
#include <attention/store_rows.cuh>
#include <attention/tile_index.cuh>
#include <attention/tile_mask.cuh>
#include <forward/parts/mma_products.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/mma.cuh>
#include <ptx/opaque.cuh>
#include <tile/async_copy.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

constexpr int depth = cdiv(d, step) * step;   // columns of Q and K, padded with zeros
constexpr int width = cdiv(dv, step) * step;  // columns of V and O
using OwnRows = Rows<Wr, pack_gqa>;

struct Shared {
  operand Q[Br][depth < width ? width : depth];  // reused for O in the epilogue
  operand K[stages][Bc][depth];
  operand V[stages][Bc][width];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads == warp_size * Br / Wr, "each warp owns Wr rows");
static_assert(Wr % step == 0 && Bc % step == 0, "tiles are multiples of the MMA shape");

// State of a warp in the main loop over tiles of keys.
struct Task : KeyTiles {
  Shared& shared;
  Scorer<real> scorer;
  Head keys, values;
  int own_row, lane;
  int end;  // end of the keys that are visible to any row of the block
};

// Processes one tile of keys: S = Q K^T, P = softmax(S), O += P V. On entry the tile's K has
// arrived, and with two buffers its V as well; on exit the same holds for the next tile. `masked`
// is false if every row sees every key of the tile.
template <bool masked>
__device__ __forceinline__ void attend(const Task& task, int first_key, int buffer,
                                       Fragments<Wr, width>& O, OwnRows& rows) {
  Shared& shared = task.shared;
  const bool more = task.after<Bc>(first_key) < task.end;
  // The warp's last row has the largest kv_end: no row of the warp sees a tile beyond it.
  const int last_row = rows.row(Wr / step - 1, 1) | 7;
  const bool seen = !masked || first_key < rows.extent.kv_end(last_row / pack_gqa);
  if (stages == 1) copy_rows<threads, dv>(shared.V[0], task.values, first_key);
  if (stages == 2 && more) {
    copy_rows<threads, d>(shared.K[1 - buffer], task.keys, first_key + task.stride<Bc>(first_key));
    copy_rows<threads, dv>(shared.V[1 - buffer], task.values,
                           first_key + task.stride<Bc>(first_key));
  }
  cp_async_commit_group();
  Fragments<Wr, Bc> S = {};
  if (seen) multiply_scores(shared.Q, shared.K[buffer], S, task.own_row, task.lane);
  if (stages == 1) {
    cp_async_wait_group<0>();
    __syncthreads();  // V has arrived, and K is no longer read
    if (more) copy_rows<threads, d>(shared.K[0], task.keys, first_key + task.stride<Bc>(first_key));
    cp_async_commit_group();
  }
  if (seen) {
    task.scorer.apply(S, rows, first_key, task.is_full<Bc>(first_key));
    rescale<masked>(S, O, rows, first_key, task.lane);
    multiply_output(shared.V[buffer], S, O, rows, first_key, task.lane);
  }
  cp_async_wait_group<0>();
  __syncthreads();  // the next K has arrived, and this tile is no longer read
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_pipelined(
    Tensor<const operand> Q, Tensor<const operand> K, Tensor<const operand> V, Tensor<result> O,
    Tensor<real> lse, Sizes sizes, int heads, int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const auto [tile, head, batch] =
      place_of_rows<Br, pack_gqa>(blockIdx.x, sizes, mods, heads / pack_gqa);
  const int lane = threadIdx.x % warp_size, own_row = threadIdx.x / warp_size * Wr;
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

  copy_rows<threads, d, pack_gqa>(shared.Q, queries, first_row);
  copy_rows<threads, d>(shared.K[0], keys, start);
  if (stages == 2) copy_rows<threads, dv>(shared.V[0], values, start);
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncthreads();  // Q and the first tile have arrived
  Fragments<Wr, width> sums = {};
  OwnRows rows(first_row + own_row + lane / 4, extent, scorer.scale2());
  keys.aligned = values.aligned = keys.aligned && values.aligned;  // saves a register
  const Task task = {map, shared, scorer, keys, values, own_row, lane, extent.kv_end(last_query)};
  int buffer = 0;
  for (int first_key = start; first_key < task.end; first_key = task.after<Bc>(first_key)) {
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
  const int row = (cdiv(opaque(extent.M) * pack_gqa, Br) - 1 - same.tile) * Br;
  if (needs_repair(sums, rows)) {
    repair_rows<d, dv, true>(Q, K, V, O, lse, rows, same.batch, same.head,
                             same.head * pack_gqa / group, scorer);
    return;
  }
  finish_rows(sums, rows, lse, same.batch, same.head, lane);
  if constexpr (sizeof(result) == sizeof(operand))
    store_output<dv, pack_gqa>(shared.Q, sums, O, same.batch, same.head, row, extent.M, own_row,
                               lane);
  else
    store_rows<dv>(sums, rows, O, same.batch, same.head, lane);
}
