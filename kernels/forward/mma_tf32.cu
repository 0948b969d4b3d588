// mma_tf32: `mma_async` on float32: its operands are rounded to tf32, 8 bits of exponent and 10 of
// mantissa, its sums are float.
//
// Q and K are read as 16-bit numbers are, for a float is a pair of them: the fragments come out
// right. P's are not the accumulators of S as they lie, but the keys of a product may come in any
// order: index c is key 2c and c + 4 is key 2c + 1, and rows of V are taken so.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   grid (cdiv(M * pack_gqa, Br) * heads / pack_gqa * batch)    block (32 * Br / Wr)
//   the host sets: scalar, operand, real, Br, Bc, Wr, stages, pack_gqa, d, dv, causal, windowed,
//   threads, shared_bytes
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
constexpr int rank = 8;  // of a product: its columns of A, its rows of B

struct Shared {
  operand Q[Br][depth < width ? width : depth];  // at the end O takes its place
  operand K[stages][Bc][depth];
  operand V[stages][Bc][width];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(sizeof(operand) == 4, "these tensor-core products take float32");
static_assert(threads == warp_size * Br / Wr, "each warp owns Wr rows");
static_assert(Wr % step == 0 && Bc % step == 0, "tiles are made of whole products");

// Takes the sign of the scale, or its being 0, into Q, which leaves a positive scale.
__device__ void apply_sign(Shared& shared, float scale) {
#pragma unroll 1
  for (int i = threadIdx.x; i < Br * depth; i += threads) {
    operand& q = at(shared.Q, i / depth, i % depth / in_chunk)[i % in_chunk];
    q = operand(float(q) * (scale < 0 ? -1.0f : 0.0f));
  }
}

// Four matrices as `ldmatrix` brings them, rounded.
__device__ __forceinline__ void load_rounded(unsigned (&r)[4], const operand* row) {
  ldmatrix(r, row);
#pragma unroll
  for (int j = 0; j < 4; ++j) r[j] = round_to_tf32(__uint_as_float(r[j]));
}

// S = Q K^T for the warp's rows and the tile's keys.
__device__ __forceinline__ void multiply_scores(Shared& shared, operand (&K)[Bc][depth],
                                                Fragments<Wr, Bc>& S, int first_row, int lane) {
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

// P of 8 keys, a product of S, is an operand of O += P V, its columns 2c and 2c + 1 in the places
// of c and c + 4. It is computed right before, so that exponentials of some keys and products of
// others go on together.
__device__ __forceinline__ void multiply_output(operand (&V)[Bc][width], Fragments<Wr, Bc>& S,
                                                Fragments<Wr, width>& O, OwnRows& rows, int lane) {
  float sum[Wr / step][2] = {};
  lane = opaque(lane);
#pragma unroll
  for (int k = 0; k < Bc / rank; ++k) {
    exponentiate(S, k, rows, sum);
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

// What a warp has to do with each tile of keys.
struct Task {
  Shared& shared;
  Head keys, values;
  int own_row, lane;
  int end, seen;  // keys that some row of the block sees, of the warp
};

// One tile of keys: S = Q K^T, P = softmax(S), O += P V. K is there when it begins, and V too if
// tiles have two buffers; the next is there when it ends. Unless it is `masked`, all rows see all
// of its keys.
template <bool masked>
__device__ __forceinline__ void attend(const Task& task, int first_key, int buffer,
                                       Fragments<Wr, width>& O, OwnRows& rows) {
  Shared& shared = task.shared;
  const bool more = first_key + Bc < task.end, seen = !masked || first_key < task.seen;
  if (stages == 1) copy_rows<dv>(shared.V[0], task.values, first_key);
  if (stages == 2 && more) {
    copy_rows<d>(shared.K[1 - buffer], task.keys, first_key + Bc);
    copy_rows<dv>(shared.V[1 - buffer], task.values, first_key + Bc);
  }
  cp_async_commit_group();
  Fragments<Wr, Bc> S = {};
  if (seen) multiply_scores(shared, shared.K[buffer], S, task.own_row, task.lane);
  if (stages == 1) {
    cp_async_wait_group<0>();
    __syncthreads();  // V is there, and K is no longer read
    if (more) copy_rows<d>(shared.K[0], task.keys, first_key + Bc);
    cp_async_commit_group();
  }
  const bool nonfinite = has_mask && masked && __syncthreads_or(has_nonfinite(shared.V[buffer]));
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

// Writes the warp's rows of O, by way of shared memory, so that lanes store 16 bytes side by side.
__device__ void store_output(Shared& shared, const Fragments<Wr, width>& O, Tensor<scalar> out,
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
    scalar* to = out.row(batch, head * pack_gqa + packed_row % pack_gqa, packed_row / pack_gqa) +
                 chunk * in_chunk;
    if (aligned && count == in_chunk) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int j = 0; j < count; ++j) to[j] = from[j];
    }
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_tf32(
    Tensor<const operand> Q, Tensor<const operand> K, Tensor<const operand> V, Tensor<scalar> O,
    Tensor<real> lse, int M, int N, int heads, int group, int causal_offset, int window_offset,
    real scale) {
  Shared& shared = shared_memory<Shared>();
  const int tiles = cdiv(M * pack_gqa, Br);
  const auto [tile, head, batch] = place(blockIdx.x, tiles, heads / pack_gqa);
  const int first_row = (tiles - 1 - tile) * Br;  // the longest rows of a causal mask first
  const int lane = threadIdx.x % warp_size, own_row = threadIdx.x / warp_size * Wr;
  const Head queries(Q, batch, head * pack_gqa, M * pack_gqa);
  const Head keys(K, batch, head * pack_gqa / group, N),
      values(V, batch, head * pack_gqa / group, N);
  const int start =
      kv_begin(first_row / pack_gqa, N, window_offset) / Bc * Bc;  // the first tile that is seen

  copy_rows<d, pack_gqa>(shared.Q, queries, first_row);
  copy_rows<d>(shared.K[0], keys, start);
  if (stages == 2) copy_rows<dv>(shared.V[0], values, start);
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncthreads();
  if (scale <= 0) {
    apply_sign(shared, scale);
    __syncthreads();
  }
  Fragments<Wr, width> sums = {};
  OwnRows rows(first_row + own_row + lane / 4, Extent{M, N, causal_offset, window_offset},
               log2e * (scale == 0 ? 1.0f : fabs(scale)));
  const int seen_by_all = kv_end(first_row / pack_gqa, N, causal_offset);
  const int last_row = (min(first_row + Br, M * pack_gqa) - 1) / pack_gqa;
  const int end = kv_end(last_row, N, causal_offset);
  const int hidden_from_some = kv_begin(last_row, N, window_offset);
  const int seen = kv_end((first_row + own_row + Wr - 1) / pack_gqa, N, causal_offset);
  const Task task = {shared, keys, values, own_row, lane, end, seen};
  int buffer = 0;
  for (int first_key = start; first_key < end; first_key += Bc) {
    if (first_key + Bc <= seen_by_all && first_key >= hidden_from_some)
      attend<false>(task, first_key, buffer, sums, rows);
    else
      attend<true>(task, first_key, buffer, sums, rows);
    buffer = stages - 1 - buffer;
  }
  finish_rows(sums, rows, lse, batch, head, lane);
  store_output(shared, sums, O, batch, head, first_row, M, own_row, lane);
}
