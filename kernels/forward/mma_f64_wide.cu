// mma_f64_wide: `mma_f64` for wide heads, whose accumulators do not fit into one warp's registers.
//
// A team of four warps owns 32 rows. Each warp multiplies a quarter of the columns of Q and K for
// all 32 rows, and the warps exchange their partial scores. Each warp then computes the softmax of
// 8 rows, shares their P with the team, and accumulates a quarter of the columns of O.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   grid (cdiv(M * pack_gqa, Br) * heads / pack_gqa * batch)    block (4 * Br)
//   the host sets: scalar, result, operand, real, Br, Bc, pack_gqa, d, dv, threads, shared_bytes
//   and options (extent.cuh)
#include <attention/exp2_f64.cuh>
#include <attention/finish_rows.cuh>
#include <attention/nonfinite.cuh>
#include <attention/row_maxima.cuh>
#include <attention/score.cuh>
#include <attention/store_rows.cuh>
#include <attention/tile_index.cuh>
#include <attention/tile_mask.cuh>
#include <forward/parts/f64_tiles.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/named_barrier.cuh>
#include <ptx/opaque.cuh>
#include <tile/f64_fragments.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>
#include <timeline.cuh>

constexpr int team = 4, team_rows = 2 * step;              // warps per team, rows per team
constexpr int depth = cdiv(d, step) * step;                // columns of Q and K, padded with zeros
constexpr int width = cdiv(dv, team* step) * team * step;  // columns of V and O
constexpr int own_width = width / team;
using OwnRows = Rows<step, pack_gqa>;  // of a lane's two rows only the first is used
using TeamRows = Rows<team_rows, pack_gqa>;
using Sums = Fragments<team_rows, own_width>;

struct Shared {
  double2 Q[Br / step][depth / step][4][warp_size];  // pairs: rows r and r + 8 of a column
  operand K[Bc][depth];
  operand V[Bc][width];
  double2 exchange[Br / 8][team][2][warp_size];  // per 8 rows: partial S of each warp, then P
  operand factors[Br];                           // rescale factors of O
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(sizeof(operand) == 8, "these tensor-core products take float64");
static_assert(threads == warp_size * Br / 8 && Br % team_rows == 0, "four warps own 32 rows");
static_assert(Bc == step, "P of a tile is one operand");

// State of a warp in the main loop over tiles of keys. This is warp `turn` of team `group`, which
// computes the softmax of rows 8 * eight … 8 * eight + 7.
struct Task : KeyTiles {
  Shared& shared;
  Scorer<real> scorer;
  Head keys, values;
  int group, turn, eight, lane;
  int end;  // end of the keys that are visible to any row of the block
};

__device__ __forceinline__ void load_values(operand (&V)[Bc][width], const Head& values,
                                            int first_key) {
  copy_tile<threads, width, width == dv>(V, values, first_key, 0, dv);
}

// Computes the team's S = Q K^T over the warp's columns, and writes it to shared memory.
__device__ __forceinline__ void write_scores(const Task& task) {
  const timeline::Phase phase(timeline::products);
  constexpr int share = cdiv(depth / step, team);
  const AlongRows<depth> keys(task.shared.K, 0, task.lane);
  const int begin = task.turn * share, end = min(begin + share, depth / step);
  Fragments<team_rows, Bc> S = {};
#pragma unroll 2
  for (int k = begin; k < end; ++k) {
    double a[2][8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const double2 pair = task.shared.Q[task.group * 2 + i / 4][k][i % 4][task.lane];
      a[i / 4][i % 4 * 2] = pair.x, a[i / 4][i % 4 * 2 + 1] = pair.y;
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      double b[4];
      keys.load(b, n * 8, k);
#pragma unroll
      for (int i = 0; i < 2; ++i) multiply_add_f64(S[i][n], a[i], b);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const double (&sums)[4] = S[i / 4][i % 2];
    const int half = i / 2 % 2;
    task.shared.exchange[task.group * team + i / 2][task.turn][i % 2][task.lane] = {
        sums[2 * half], sums[2 * half + 1]};
  }
}

// Computes P = exp(S - maximum) of the warp's 8 rows. Writes P and the factors that rescale O to
// shared memory.
template <bool masked>
__device__ __forceinline__ void write_weights(const Task& task, OwnRows& rows, int first_key) {
  double2(&exchange)[team][2][warp_size] = task.shared.exchange[task.eight];
  Fragments<step, Bc> S = {};
#pragma unroll
  for (int i = 0; i < 2 * team; ++i) {
    const double2 pair = exchange[i / 2][i % 2][task.lane];
    S[0][i % 2][0] += pair.x, S[0][i % 2][1] += pair.y;
  }
  task.scorer.apply(S, rows, first_key, task.is_full<Bc>(first_key));
  const timeline::Phase phase(timeline::softmax, 4);
  const int first = first_key + 2 * (task.lane % 4);
  real maximum = -infinity, sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    real& x = S[0][i / 2][i % 2];
    if (masked && !rows.in_reach(0, 0, first + i / 2 * 8 + i % 2)) x = -infinity;
    maximum = fmax(maximum, x);
  }
  maximum = fmax(maximum, __shfl_xor_sync(full_warp, maximum, 1));
  maximum = fmax(maximum, __shfl_xor_sync(full_warp, maximum, 2));
  rows.raise_row_max_to(0, maximum, rows.scale2);
  const real before = rows.maximum[0][0], now = fmax(before, rows.exponent_of(maximum));
  const real factor = exp2f(before - now);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    real& x = S[0][i / 2][i % 2];
    x = exp2f(x * rows.scale2 - now);
    sum += x;
  }
  rows.maximum[0][0] = now;
  rows.sum[0][0] = rows.sum[0][0] * factor + sum;
  // Dropout uses one random word for rows r and r + 8 of 16, but one for each row with packed GQA.
  const int half = pack_gqa == 1 ? rows.first / 8 % 2 : 0;
  for_dropped(S, 0, 1, rows, first_key, [&](int i, int j, int e) {
    if (e / 2 == half) S[i][j][e % 2] = 0;
  });
#pragma unroll
  for (int n = 0; n < 2; ++n) exchange[0][n][task.lane] = {S[0][n][0], S[0][n][1]};
  if (task.lane % 4 == 0) task.shared.factors[task.eight * 8 + task.lane / 4] = factor;
}

// Adds P V to the warp's columns of O, for all rows of the team.
__device__ __forceinline__ void add_output(const Task& task, Sums& O) {
  const timeline::Phase phase(timeline::products);
  double a[2][8], factor[2][2];
  bool risen = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int eight = task.group * team + i;
    real& own = factor[i / 2][i % 2];
    own = task.shared.factors[eight * 8 + task.lane / 4];
    risen |= own != 1;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const double2 pair = task.shared.exchange[eight][0][n][task.lane];
      a[i / 2][n * 4 + i % 2] = pair.x, a[i / 2][n * 4 + 2 + i % 2] = pair.y;
    }
  }
  if (__any_sync(full_warp, risen)) scale_rows(O, factor);
  const DownColumns<width> values(task.shared.V, task.turn * own_width, task.lane);
#pragma unroll
  for (int n = 0; n < own_width / 8; ++n) {
    double b[4];
    values.load(b, 0, n);
#pragma unroll
    for (int i = 0; i < 2; ++i) multiply_add_f64(O[i][n], a[i], b);
  }
}

// Processes one tile of keys: S = Q K^T, P = softmax(S), O += P V. On entry the tile's K has
// arrived, on exit the next tile's. `masked` is false if every row sees every key of the tile.
template <bool masked>
__device__ __forceinline__ void attend(const Task& task, int first_key, Sums& O, OwnRows& rows,
                                       int last_row) {
  Shared& shared = task.shared;
  const bool more = task.after<Bc>(first_key) < task.end,
             seen = !masked || first_key < rows.extent.kv_end(last_row / pack_gqa);
  load_values(shared.V, task.values, first_key);
  cp_async_commit_group();
  if (seen) write_scores(task);
  cp_async_wait_group<0>();
  __syncthreads();  // V and partial scores are ready; K is no longer read
  if (more) copy_rows<threads, d>(shared.K, task.keys, first_key + task.stride<Bc>(first_key));
  cp_async_commit_group();
  if (seen) {
    write_weights<masked>(task, rows, first_key);
    barrier_sync(1 + task.group, team * warp_size);
    add_output(task, O);
  }
  cp_async_wait_group<0>();
  __syncthreads();  // the next K has arrived, and this tile is no longer read
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_f64_wide(
    Tensor<const operand> Q, Tensor<const operand> K, Tensor<const operand> V, Tensor<result> O,
    Tensor<real> lse, Sizes sizes, int heads, int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const auto [tile, head, batch] =
      place_of_rows<Br, pack_gqa>(blockIdx.x, sizes, mods, heads / pack_gqa);
  const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
  const int own_team = warp / team, turn = warp % team;
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

  copy_rows<threads, d>(shared.K, keys, start);
  cp_async_commit_group();
  load_queries<threads, pack_gqa, d>(shared.Q, queries, first_row);
  cp_async_wait_group<0>();
  __syncthreads();  // Q and the first tile have arrived
  Sums sums = {};
  OwnRows own_rows(first_row + warp * 8 + lane / 4, extent, scorer.scale2());
  keys.aligned = values.aligned = keys.aligned && values.aligned;  // saves a register
  const int end = extent.kv_end(last_query);
  const Task task = {map, shared, scorer, keys, values, own_team, turn, warp, lane, end};
  const int last_row = first_row + (own_team + 1) * team_rows - 1;
  for (int first_key = start; first_key < end; first_key = task.after<Bc>(first_key)) {
    timeline::event(timeline::tile, first_key, first_query);
    if (is_masked(extent, first_query, last_query + 1 - first_query, first_key, Bc))
      attend<true>(task, first_key, sums, own_rows, last_row);
    else
      attend<false>(task, first_key, sums, own_rows, last_row);
  }
  shared.exchange[warp][0][0][lane] = {own_rows.maximum[0][0], own_rows.sum[0][0]};
  if (has_row_max) shared.exchange[warp][0][1][lane].x = own_rows.row_max(0);
  __syncthreads();  // maxima and sums of all rows are written
  TeamRows rows(first_row + own_team * team_rows + lane / 4, extent, scorer.scale2());
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const double2 of_row = shared.exchange[own_team * team + i][0][0][lane];
    rows.maximum[i / 2][i % 2] = of_row.x, rows.sum[i / 2][i % 2] = of_row.y;
    if (has_row_max) rows.set_row_max(i, shared.exchange[own_team * team + i][0][1][lane].x);
  }
  // Recomputes the block's position, so that it occupies no registers during the loop.
  const Place same =
      place_of_rows<Br, pack_gqa>(opaque(int(blockIdx.x)), sizes, mods, heads / pack_gqa);
  // All warps of a team must agree to repair: the warp that repairs a row writes all its columns.
  const bool wrong = needs_repair(sums, rows);
  if (__syncthreads_or(wrong)) {
    if (turn == 0)
      repair_rows<d, dv, true>(Q, K, V, O, lse, rows, same.batch, same.head,
                               same.head * pack_gqa / group, scorer);
    return;
  }
  finish_rows(sums, rows, lse, same.batch, same.head, lane, turn == 0);
  store_rows<dv>(sums, rows, O, same.batch, same.head, lane, turn * own_width);
}
