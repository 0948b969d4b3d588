// mma_async: `mma_swizzled`, with copies that go on while the tensor cores work.
//
// cp.async brings chunks from global to shared memory past the registers, and nobody waits for it
// before the data is needed. With two stages K and V have two buffers, and the next tile comes
// while this one is multiplied: one barrier a step. With one, V comes while S = Q K^T is computed,
// and the next K while softmax and O += P V are: two barriers.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   grid (cdiv(M * pack_gqa, Br) * heads / pack_gqa * batch)    block (32 * Br / Wr)
//   the host sets: scalar, operand, real, Br, Bc, Wr, stages, pack_gqa, d, dv, causal, windowed,
//   threads, shared_bytes
#include <forward/parts/mma_products.cuh>
#include <tile/async_copy.cuh>
#include <ptx/cp_async.cuh>
#include <attention/row_state.cuh>
#include <ptx/opaque.cuh>
#include <attention/mask.cuh>
#include <ptx/mma.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <tile/block_copy.cuh>
#include <tile/warp.cuh>

constexpr int depth = cdiv(d, step) * step;   // of Q and K, filled up with zeros
constexpr int width = cdiv(dv, step) * step;  // of V and O
using OwnRows = Rows<Wr, pack_gqa>;

struct Shared {
  operand Q[Br][depth < width ? width : depth];  // at the end O takes its place
  operand K[stages][Bc][depth];
  operand V[stages][Bc][width];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads == warp_size * Br / Wr, "each warp owns Wr rows");
static_assert(Wr % step == 0 && Bc % step == 0, "tiles are made of whole products");

// What a warp has to do with each tile of keys.
struct Task {
  Shared& shared;
  Head keys, values;
  int own_row, lane;
  int end;  // keys that some row of the block sees
};

// One tile of keys: S = Q K^T, P = softmax(S), O += P V. K is there when it begins, and V too if
// tiles have two buffers; the next is there when it ends. Unless it is `masked`, all rows see all
// of its keys.
template <bool masked>
__device__ __forceinline__ void attend(const Task& task, int first_key, int buffer,
                                       Fragments<Wr, width>& O, OwnRows& rows) {
  Shared& shared = task.shared;
  const bool more = first_key + Bc < task.end;
  // Whether the warp's last row, and so any of its rows, sees a key of the tile.
  const bool seen = !masked || first_key < kv_end((rows.row(Wr / step - 1, 1) | 7) / pack_gqa,
                                                  rows.extent.N, rows.extent.causal_offset);
  if (stages == 1) copy_rows<dv>(shared.V[0], task.values, first_key);
  if (stages == 2 && more) {
    copy_rows<d>(shared.K[1 - buffer], task.keys, first_key + Bc);
    copy_rows<dv>(shared.V[1 - buffer], task.values, first_key + Bc);
  }
  cp_async_commit_group();
  bool nonfinite =
      stages == 2 && has_mask && masked && __syncthreads_or(has_nonfinite(shared.V[buffer]));
  Fragments<Wr, Bc> S = {};
  if (seen) multiply_scores(shared.Q, shared.K[buffer], S, task.own_row, task.lane);
  if (stages == 1) {
    cp_async_wait_group<0>();
    __syncthreads();  // V is there, and K is no longer read
    if (more) copy_rows<d>(shared.K[0], task.keys, first_key + Bc);
    cp_async_commit_group();
  }
  if (stages == 1) nonfinite = has_mask && masked && __syncthreads_or(has_nonfinite(shared.V[0]));
  if (seen) {
    rescale<masked>(S, O, rows, first_key, task.lane);
    if (nonfinite)
      multiply_visible(shared.V[buffer], S, O, rows, first_key, task.lane);
    else
      multiply_output(shared.V[buffer], S, O, rows, task.lane);
  }
  cp_async_wait_group<0>();
  __syncthreads();  // the next K is there, and this tile is no longer read
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_async(
    Tensor<const operand> Q, Tensor<const operand> K, Tensor<const operand> V, Tensor<scalar> O,
    Tensor<real> lse, int M, int N, int heads, int group, int causal_offset, int window_offset,
    real scale) {
  Shared& shared = shared_memory<Shared>();
  const int tiles = cdiv(M * pack_gqa, Br);
  const auto [tile, head, batch] = place(blockIdx.x, tiles, heads / pack_gqa);
  const int first_row = (tiles - 1 - tile) * Br;  // the longest rows of a causal mask first
  const int lane = threadIdx.x % warp_size, own_row = threadIdx.x / warp_size * Wr;
  const Head queries(Q, batch, head * pack_gqa, M * pack_gqa);
  Head keys(K, batch, head * pack_gqa / group, N), values(V, batch, head * pack_gqa / group, N);
  const int start =
      kv_begin(first_row / pack_gqa, N, window_offset) / Bc * Bc;  // the first tile that is seen

  copy_rows<d, pack_gqa>(shared.Q, queries, first_row);
  copy_rows<d>(shared.K[0], keys, start);
  if (stages == 2) copy_rows<dv>(shared.V[0], values, start);
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncthreads();
  if (scale <= 0) {
    apply_sign<depth>(shared.Q, scale);
    __syncthreads();
  }
  Fragments<Wr, width> sums = {};
  OwnRows rows(first_row + own_row + lane / 4, Extent{M, N, causal_offset, window_offset},
               log2e * (scale == 0 ? 1.0f : fabs(scale)));
  const int seen_by_all = kv_end(first_row / pack_gqa, N, causal_offset);
  const int last_row = (min(first_row + Br, M * pack_gqa) - 1) / pack_gqa;
  const int end = kv_end(last_row, N, causal_offset);
  const int hidden_from_some = kv_begin(last_row, N, window_offset);
  keys.aligned = values.aligned = keys.aligned && values.aligned;  // in one register
  const Task task = {shared, keys, values, own_row, lane, end};
  int buffer = 0;
  for (int first_key = start; first_key < end; first_key += Bc) {
    if (first_key + Bc <= seen_by_all && first_key >= hidden_from_some)
      attend<false>(task, first_key, buffer, sums, rows);
    else
      attend<true>(task, first_key, buffer, sums, rows);
    buffer = stages - 1 - buffer;
  }
  // Registers do not keep the place through the loop: it is found once more.
  const int same_tiles = cdiv(opaque(M) * pack_gqa, Br);
  const Place same = place(opaque(int(blockIdx.x)), same_tiles, heads / pack_gqa);
  const int row = (same_tiles - 1 - same.tile) * Br;
  finish_rows(sums, rows, lse, same.batch, same.head, lane);
  if constexpr (sizeof(scalar) == sizeof(operand))
    store_output<dv, pack_gqa>(shared.Q, sums, O, same.batch, same.head, row, M, own_row, lane);
  else
    store_rows<dv>(sums, rows, O, same.batch, same.head, lane);
}
