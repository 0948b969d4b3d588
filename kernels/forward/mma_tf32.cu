// mma_tf32: `mma_pipelined` for float32. Operands are rounded to tf32, which has 8 bits of exponent
// and 10 of mantissa; accumulators are float.
//
// ldmatrix moves pairs of 16-bit numbers, so it can load the 32-bit fragments of Q and K. The
// layout of S is not that of the operand P, but P V may sum over the keys in any order: operand
// index c stands for key 2c, index c + 4 for key 2c + 1, and V's rows are loaded in this order.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   grid (cdiv(M * pack_gqa, Br) * heads / pack_gqa * batch)    block (32 * Br / Wr)
//   the host sets: scalar, result, operand, real, Br, Bc, Wr, stages, pack_gqa, d, dv, threads,
//   shared_bytes and options (extent.cuh)
#include <attention/finish_rows.cuh>
#include <attention/nonfinite.cuh>
#include <attention/row_softmax.cuh>
#include <attention/score.cuh>
#include <attention/tile_index.cuh>
#include <attention/tile_mask.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/mma.cuh>
#include <ptx/mma_tf32.cuh>
#include <ptx/opaque.cuh>
#include <tile/async_copy.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>
#include <timeline.cuh>

constexpr int depth = cdiv(d, step) * step;   // columns of Q and K, padded with zeros
constexpr int width = cdiv(dv, step) * step;  // columns of V and O
using OwnRows = Rows<Wr, pack_gqa>;
constexpr int rank = 8;  // columns of A and rows of B per instruction

struct Shared {
  operand Q[Br][depth < width ? width : depth];  // reused for O in the epilogue
  operand K[stages][Bc][depth];
  operand V[stages][Bc][width];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(sizeof(operand) == 4, "these tensor-core products take float32");
static_assert(threads == warp_size * Br / Wr, "each warp owns Wr rows");
static_assert(Wr % step == 0 && Bc % step == 0, "tiles are multiples of the MMA shape");

// Loads four matrices with ldmatrix and rounds their elements to tf32.
__device__ __forceinline__ void load_rounded(unsigned (&r)[4], const operand* row) {
  ldmatrix(r, row);
#pragma unroll
  for (int j = 0; j < 4; ++j) r[j] = round_to_tf32(__uint_as_float(r[j]));
}

// S = Q K^T for the warp's rows and the tile's keys.
__device__ __forceinline__ void multiply_scores(Shared& shared, operand (&K)[Bc][depth],
                                                Fragments<Wr, Bc>& S, int first_row, int lane) {
  const timeline::Phase phase(timeline::products);
#pragma unroll
  for (int k = 0; k < depth / rank; ++k) {
    unsigned a[Wr / step][4];
#pragma unroll
    for (int i = 0; i < Wr / step; ++i) {
      load_rounded(a[i], at(shared.Q, first_row + i * step + lane % 16, 2 * k + lane / 16));
    }
#pragma unroll
    for (int n = 0; n < Bc / step; ++n) {
      unsigned b[4];
      load_rounded(b, at(K, n * step + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < Wr / step; ++i) {
        multiply_add_tf32(S[i][2 * n], a[i], b[0], b[1]);
        multiply_add_tf32(S[i][2 * n + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// Computes P = exp(S - maximum) and O += P V. P of 8 keys is one operand, in which columns c and
// c + 4 are keys 2c and 2c + 1. Each operand is computed right before its product, so that the
// exponentials of some keys overlap with the products of others.
__device__ __forceinline__ void multiply_output(operand (&V)[Bc][width], Fragments<Wr, Bc>& S,
                                                Fragments<Wr, width>& O, OwnRows& rows,
                                                int first_key, int lane) {
  const timeline::Phase phase(timeline::products);
  float sum[Wr / step][2] = {};
  lane = opaque(lane);
#pragma unroll
  for (int k = 0; k < Bc / rank; ++k) {
    if (!has_dropout || k % 2 == 0) exponentiate(S, k, rows, sum);
    if (has_dropout && k % 2 == 0) exponentiate(S, k + 1, rows, sum);
    for_dropped(S, k / 2, k / 2 + 1 - k % 2, rows, first_key,
                [&](int i, int j, int e) { S[i][j][e] = 0; });
    unsigned a[Wr / step][4];
#pragma unroll
    for (int i = 0; i < Wr / step; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) a[i][j] = round_to_tf32(S[i][k][j % 2 * 2 + j / 2]);
    }
    const int key = k * rank + 2 * (lane % 4), col = lane / 4;
#pragma unroll
    for (int n = 0; n < width / 8; ++n) {
      const int chunk = 2 * n + col / in_chunk;
      const unsigned b0 = round_to_tf32(at(V, key, chunk)[col % in_chunk]);
      const unsigned b1 = round_to_tf32(at(V, key + 1, chunk)[col % in_chunk]);
#pragma unroll
      for (int i = 0; i < Wr / step; ++i) multiply_add_tf32(O[i][n], a[i], b0, b1);
    }
  }
  rows.add(sum);
}

// State of a warp in the main loop over tiles of keys.
struct Task : KeyTiles {
  Shared& shared;
  Scorer<real> scorer;
  Head keys, values;
  int own_row, lane;
  int end, seen;  // ends of the keys visible to the rows of the block and the warp
};

// Processes one tile of keys: S = Q K^T, P = softmax(S), O += P V. On entry the tile's K has
// arrived, and with two buffers its V as well; on exit the same holds for the next tile. `masked`
// is false if every row sees every key of the tile.
template <bool masked>
__device__ __forceinline__ void attend(const Task& task, int first_key, int buffer,
                                       Fragments<Wr, width>& O, OwnRows& rows) {
  Shared& shared = task.shared;
  const bool more = task.after<Bc>(first_key) < task.end, seen = !masked || first_key < task.seen;
  if (stages == 1) copy_rows<threads, dv>(shared.V[0], task.values, first_key);
  if (stages == 2 && more) {
    copy_rows<threads, d>(shared.K[1 - buffer], task.keys, first_key + task.stride<Bc>(first_key));
    copy_rows<threads, dv>(shared.V[1 - buffer], task.values,
                           first_key + task.stride<Bc>(first_key));
  }
  cp_async_commit_group();
  Fragments<Wr, Bc> S = {};
  if (seen) multiply_scores(shared, shared.K[buffer], S, task.own_row, task.lane);
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

// Writes the warp's rows of O through shared memory, so that each lane stores 16 bytes.
__device__ void store_output(Shared& shared, const Fragments<Wr, width>& O, Tensor<result> out,
                             int batch, int head, int first_row, int M, int own_row, int lane) {
  constexpr int chunks = width / in_chunk;
#pragma unroll
  for (int i = 0; i < 2 * (Wr / step); ++i) {
#pragma unroll
    for (int n = 0; n < width / 8; ++n) {
      const int col = n * 8 + 2 * (lane % 4);
      operand* to = at(shared.Q, own_row + i * 8 + lane / 4, col / in_chunk) + col % in_chunk;
      *reinterpret_cast<float2*>(to) = {O[i / 2][n][i % 2 * 2], O[i / 2][n][i % 2 * 2 + 1]};
    }
  }
  __syncwarp();
  const bool aligned = is_aligned(out);
#pragma unroll 4
  for (int i = lane; i < Wr * chunks; i += warp_size) {
    const int row = i / chunks, chunk = i % chunks, count = min(in_chunk, dv - chunk * in_chunk);
    const int packed_row = first_row + own_row + row;
    if (packed_row >= M * pack_gqa) continue;
    const operand* from = at(shared.Q, own_row + row, chunk);
    result* to = out.row(batch, head * pack_gqa + packed_row % pack_gqa, packed_row / pack_gqa) +
                 chunk * in_chunk;
    if (aligned && count == in_chunk) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int j = 0; j < count; ++j) to[j] = from[j];
    }
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_tf32(
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
  const Head keys(K, batch, kv_head, extent.N), values(V, batch, kv_head, extent.N);
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
  const int end = extent.kv_end(last_query);
  const int seen = extent.kv_end((first_row + own_row + Wr - 1) / pack_gqa);
  const Task task = {map, shared, scorer, keys, values, own_row, lane, end, seen};
  int buffer = 0;
  for (int first_key = start; first_key < end; first_key = task.after<Bc>(first_key)) {
    timeline::event(timeline::tile, first_key, first_query);
    if (is_masked(extent, first_query, last_query + 1 - first_query, first_key, Bc))
      attend<true>(task, first_key, buffer, sums, rows);
    else
      attend<false>(task, first_key, buffer, sums, rows);
    buffer = stages - 1 - buffer;
  }
  if (needs_repair(sums, rows)) {
    repair_rows<d, dv, true>(Q, K, V, O, lse, rows, batch, head, kv_head, scorer);
    return;
  }
  finish_rows(sums, rows, lse, batch, head, lane);
  store_output(shared, sums, O, batch, head, first_row, extent.M, own_row, lane);
}
