// mma_fp16x2: `mma_pipelined` with float32 accuracy. Each operand is the sum of two float16 numbers
// (split_pair.cuh). An earlier launch, split_operands, splits Q, K and V; P is split in registers.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   Q_high …, V_exponents, scale2, flags: see split_operands.cu
//   grid (cdiv(M * pack_gqa, Br) * heads / pack_gqa * batch)    block (32 * Br / Wr)
//   the host sets: scalar, result, operand, real, Br, Bc, Wr, stages, pack_gqa, d, dv, threads,
//   shared_bytes and options (extent.cuh)
#include <attention/finish_rows.cuh>
#include <attention/score.cuh>
#include <attention/store_rows.cuh>
#include <attention/tile_index.cuh>
#include <attention/tile_mask.cuh>
#include <forward/parts/split_f32/sectioned_output.cuh>
#include <forward/parts/split_f32/split_head.cuh>
#include <forward/parts/split_f32/split_output.cuh>
#include <forward/parts/split_f32/weighted_products.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/mma.cuh>
#include <ptx/opaque.cuh>
#include <tile/async_copy.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>

constexpr int depth = cdiv(d, step) * step;   // columns of Q and K, padded with zeros
constexpr int width = cdiv(dv, step) * step;  // columns of V and O
// Whether fragments are loaded one step ahead. This is 5 % faster at d = 64 and, with tiles of 64
// keys, 11 % faster at d = 128, but 8 % slower at d = 256, where registers run out.
constexpr bool looks_ahead = depth % 64 == 0 && depth <= 128 && width <= 128;
using OwnRows = SplitRows<Wr, pack_gqa>;

struct Shared {  // each array: high parts, then low parts
  operand Q[2][Br][depth];
  operand K[stages][2][Bc][depth];
  operand V[stages][2][Bc][width];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(threads == warp_size * Br / Wr, "each warp owns Wr rows");
static_assert(Wr % step == 0 && Bc % step == 0, "tiles are multiples of the MMA shape");

// State of a warp in the main loop over tiles of keys.
struct Task : KeyTiles {
  Shared& shared;
  Scorer<real> scorer;
  SplitHead<depth> keys;
  SplitHead<width> values;
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
  if (stages == 1) task.values.copy<threads>(shared.V[0], first_key);
  if (stages == 2 && more) {
    task.keys.copy<threads>(shared.K[1 - buffer], first_key + task.stride<Bc>(first_key));
    task.values.copy<threads>(shared.V[1 - buffer], first_key + task.stride<Bc>(first_key));
  }
  cp_async_commit_group();
  Fragments<Wr, Bc> S = {};
  if (seen)
    multiply_scores<looks_ahead ? 4 : 1>(shared.Q, shared.K[buffer], S, task.own_row, task.lane);
  if (stages == 1) {
    cp_async_wait_group<0>();
    __syncthreads();  // V has arrived, and K is no longer read
    if (more) task.keys.copy<threads>(shared.K[0], first_key + task.stride<Bc>(first_key));
    cp_async_commit_group();
  }
  if (seen) {
    apply_scorer(task.scorer, S, rows, first_key, task.is_full<Bc>(first_key));
    float weight[Wr / step][2];
    weigh<masked>(S, O, rows, first_key, task.lane, weight);
    multiply_output<looks_ahead>(shared.V[buffer], S, O, weight, task.lane);
  }
  cp_async_wait_group<0>();
  __syncthreads();  // the next K has arrived, and this tile is no longer read
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_fp16x2(
    Tensor<const operand> Q_high, Tensor<const operand> Q_low, Tensor<const operand> K_high,
    Tensor<const operand> K_low, Tensor<const operand> V_high, Tensor<const operand> V_low,
    const int* V_exponents, Tensor<const real> scale2, Tensor<unsigned char> flags,
    Tensor<result> O, Tensor<real> lse, Sizes sizes, int heads, int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const auto [tile, head, batch] =
      place_of_rows<Br, pack_gqa>(blockIdx.x, sizes, mods, heads / pack_gqa);
  const int lane = threadIdx.x % warp_size, own_row = threadIdx.x / warp_size * Wr;
  const Extent extent = extent_of(sizes, mods, batch, head * pack_gqa);
  const int first_row = (cdiv(extent.M * pack_gqa, Br) - 1 - tile) * Br;  // longest tile first
  if (!extent.has_tile_of_rows(first_row / pack_gqa)) return;
  // Without score_mod, split_operands has folded the scale into scale2 and its sign into Q.
  const Scorer<real> scorer = {has_score_mod ? scale : real(1), mods};
  const int kv_head = head * pack_gqa / group;
  const SplitHead<depth> queries(Q_high, Q_low, batch, head * pack_gqa, extent.M * pack_gqa);
  const SplitHead<depth> keys(K_high, K_low, batch, kv_head, extent.N);
  const SplitHead<width> values(V_high, V_low, batch, kv_head, extent.N);
  const int first_query = first_row / pack_gqa;
  const int last_query = (min(first_row + Br, extent.M * pack_gqa) - 1) / pack_gqa;
  const auto map = extent.key_tiles(first_row / Br);
  const int start = map.from<Bc>(extent.kv_begin(first_query) / Bc * Bc);  // first visible tile

  queries.copy<threads, pack_gqa>(shared.Q, first_row);
  keys.copy<threads>(shared.K[0], start);
  if (stages == 2) values.copy<threads>(shared.V[0], start);
  cp_async_commit_group();
  Fragments<Wr, width> sums = {};
  OwnRows rows(first_row + own_row + lane / 4, extent, scorer.scale2());
  rows.read_units(scale2, batch, head);
  cp_async_wait_group<0>();
  __syncthreads();  // Q and the first tile have arrived
  const Task task = {map, shared, scorer, keys, values, own_row, lane, extent.kv_end(last_query)};
  EarlierSums<Wr / step> earlier;
  int buffer = 0, section_end = end_of_section(start);
  for (int first_key = start; first_key < task.end; first_key = task.after<Bc>(first_key)) {
    timeline::event(timeline::tile, first_key, first_query);
    if (first_key >= section_end) {
      const Place own =
          place_of_rows<Br, pack_gqa>(opaque(int(blockIdx.x)), sizes, mods, heads / pack_gqa);
      earlier.add<true, dv>(sums, rows, O, lse, own.batch, own.head, lane);
      section_end = end_of_section(first_key);
    }
    if (is_masked(extent, first_query, last_query + 1 - first_query, first_key, Bc))
      attend<true>(task, first_key, buffer, sums, rows);
    else
      attend<false>(task, first_key, buffer, sums, rows);
    buffer = stages - 1 - buffer;
  }
  // Recomputes the block's position, so that it occupies no registers during the loop.
  const Place same =
      place_of_rows<Br, pack_gqa>(opaque(int(blockIdx.x)), sizes, mods, heads / pack_gqa);
  const long long key_heads = heads / group, own_head = same.head * pack_gqa / group;
  const int* exponents = V_exponents + (same.batch * key_heads + own_head) * dv;
  if (earlier.any) earlier.add<false, dv>(sums, rows, O, lse, same.batch, same.head, lane);
  rows.move_maxima(weight_exponent);
  finish_rows(sums, rows, lse, same.batch, same.head, lane);
  flag_rows<dv>(sums, rows, exponents, flags, same.batch, same.head, lane);
  scale_columns<dv>(sums, exponents, lane);
  store_rows<dv>(sums, rows, O, same.batch, same.head, lane);
}
