// mma_slices_backward_scores: computes P and dS for a round of heads and writes them in 16 bits.
//
// S = Q K^T is accumulated over slices of d, and P is parked in shared memory in float32. Then dP =
// dO V^T is accumulated over slices of dv in the same registers. Tiles without a visible pair are
// neither written here nor read later.
//
//   Q, dO [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]
//   lse, delta [batch, heads, M]    P, dS: [heads of the round, M, stride], see gradient_slices.cuh
//   grid (max(cdiv(M, Br) * cdiv(keys of the round, Bc), 1) * heads of the round)
//   block (32 * Br * Bc / (Wr * Wc)): each warp owns Wr x Wc of S
//   the host sets: scalar, operand, real, Br, Bc, Wr, Wc, Bd, stages, room, d, dv, threads,
//   shared_bytes and options (extent.cuh)
#include <attention/dropped_weights.cuh>
#include <attention/tile_pair.cuh>
#include <backward/parts/gradient_slices.cuh>
#include <backward/parts/mma_gradients.cuh>
#include <backward/parts/tile_products.cuh>
#include <tile/own_lane.cuh>
#include <tile/store.cuh>
#include <timeline.cuh>

using Tiles = Slices<threads, Br, Bc, Wr, Wc, Bd, stages>;
using Stage = Tiles::Stage;
using Own = Tiles::Own;

constexpr int rows_of_thread = Wr / 8;
constexpr int pairs_of_sums = rows_of_thread * (Wc / 8);  // pairs of accumulators per thread
constexpr int slices = cdiv(d, Bd);  // slices of Q and K; slices of dO and V come after them

struct Shared {
  Stage ring[stages];
  float2 PS[pairs_of_sums][threads];  // P times d(modified score) / d(raw score)
  RowStats stats[Br];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

struct Slice {
  operand rows[Br][Bd];
  operand keys[Bc][Bd];
};

struct Source {
  Tensor<const operand> Q, K, V, dO;
  int M, N, batch, head, kv_head, first_row, first_key, slice = 0;

  template <int cols>
  __device__ __forceinline__ void copy(Slice& to, Tensor<const operand> of_rows,
                                       Tensor<const operand> of_keys, int col) const {
    const int b = opaque(batch);  // head addresses are recomputed to save registers
    copy_tile<threads, Bd, cols % Bd == 0>(to.rows, Head(of_rows, b, head, M), first_row, col,
                                           cols - col);
    copy_tile<threads, Bd, cols % Bd == 0>(to.keys, Head(of_keys, b, kv_head, N), first_key, col,
                                           cols - col);
  }
  __device__ __forceinline__ void begin(Stage& stage) {
    Slice& to = stage.as<Slice>();
    if (slice < slices)
      copy<d>(to, Q, K, slice * Bd);
    else if (slice < slices + cdiv(dv, Bd))
      copy<dv>(to, dO, V, (slice - slices) * Bd);
    ++slice;
  }
};

using Sums = float[Wr / step][Wc / 8][4];

__device__ __forceinline__ void multiply_slices(Ring<Source, Stage, stages>& ring, int count,
                                                Sums& sums) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    Slice& slice = ring.next().template as<Slice>();
    multiply_transposed(sums, slice.rows, slice.keys, Own(Wc), own_lane());
    ring.done();
  }
}

// The range of keys in a tile that a row sees.
struct RowMask {
  int first, end;  // relative to the tile's first key

  __device__ __forceinline__ RowMask(const TilePair<Br, Bc>& pair, int row) {
    const int key = opaque(pair.first_key);  // delays the mask arithmetic, which needs registers
    first = pair.extent.kv_begin(pair.first_row + row) - key;
    end = pair.extent.kv_end(pair.first_row + row) - key;
  }
  __device__ __forceinline__ bool reaches(int col) const { return col >= first && col < end; }
};

// Applies dropout: marks the parked weights (dropout.cuh) and sets dropped elements of P to 0.
template <class Pair>
__device__ __forceinline__ void drop(Sums& P, Shared& shared, const Own& own, const Pair& pair,
                                     int lane) {
  if constexpr (has_dropout)
    mark_and_drop(P, pair.extent, pair.first_row + own.row + lane / 4,
                  pair.first_key + own.col + 2 * (lane % 4), [&](int i, int j, int e) -> float& {
                    float2& parked = shared.PS[(2 * i + e / 2) * (Wc / 8) + j][threadIdx.x];
                    return e % 2 ? parked.y : parked.x;
                  });
}

// Moves each row of a thread to the row before it, and the first row to the last one.
__device__ __forceinline__ void rotate_rows(Sums& sums) {
#pragma unroll
  for (int n = 0; n < Wc / 8; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float first = sums[0][n][e];
#pragma unroll
      for (int i = 0; i < rows_of_thread - 1; ++i)
        sums[i / 2][n][i % 2 * 2 + e] = sums[(i + 1) / 2][n][(i + 1) % 2 * 2 + e];
      sums[Wr / step - 1][n][2 + e] = first;
    }
}

// Replaces S with P = 2^(S * scale2 - lse2) and parks PS, P times the derivative of the score
// modification. masked: pairs may be hidden. has_huge: a row's lse may be huge; then lse2 is NaN,
// and lse_of(row) is used. That is rare, and code for it must not evict other code from the
// instruction cache: its loop is not unrolled. Since a run-time index would move S to local memory,
// each iteration computes the first row and rotates the rows.
template <bool masked, bool has_huge, class LseOf>
__device__ __forceinline__ void compute_P(Sums& S, Shared& shared, const Own& own,
                                          const TilePair<Br, Bc>& pair, const Scorer<float>& scorer,
                                          int lane, LseOf lse_of) {
  const timeline::Phase phase(timeline::softmax, Wr * Wc / 32);
  // Exact, since cap_approximately would spread a row's NaN to others, and repairs read P.
  pair.extent.template cap<false>(reinterpret_cast<float (&)[Wr * Wc / 32]>(S), scorer.scale);
#pragma unroll(has_huge ? 1 : rows_of_thread)
  for (int i = 0; i < rows_of_thread; ++i) {
    const int place = has_huge ? 0 : i;
    const int row = opaque(own.row) + i * 8 + lane / 4;
    const float lse2 = shared.stats[row].lse2;
    const bool is_huge = has_huge && isnan(lse2);
    const float lse = is_huge ? lse_of(row) : 0;
    const RowMask mask(pair, row);
#pragma unroll
    for (int n = 0; n < Wc / 8; ++n) {
      float PS[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = S[place / 2][n][place % 2 * 2 + e];
        const int more = n * 8 + e, key = own.col + 2 * (lane % 4);
        const Index at_row = pair.row(row);
        const auto at_key = pair.key<masked>(key, more);
        const auto [score, slope] = scorer.with_slope<caps_tiles>(x, pair.extent, at_row, at_key);
        // Without expressions, the scale and log2e are combined into one factor.
        const float exponent = has_expressions ? score * log2e : x * (scorer.scale * log2e);
        x = exp2f(is_huge ? log_weight(score, lse) * log2e : exponent - lse2);
        if ((masked && !mask.reaches(key + more)) || hides_pair<masked>(pair, row, key, more))
          x = 0;
        PS[e] = score_gradient(x, 1.0f, slope);
      }
      shared.PS[i * (Wc / 8) + n][threadIdx.x] = float2{PS[0], PS[1]};
    }
    if constexpr (has_huge) rotate_rows(S);
  }
  drop(S, shared, own, pair, lane);
}

// Replaces dP with the unscaled dS = PS * (dP - delta).
template <bool masked>
__device__ __forceinline__ void compute_dS(Sums& dP, const Shared& shared, const Own& own,
                                           const TilePair<Br, Bc>& pair, int lane) {
  const timeline::Phase phase(timeline::softmax, Wr * Wc / 32);
#pragma unroll
  for (int i = 0; i < rows_of_thread; ++i) {
    const int row = opaque(own.row) + i * 8 + lane / 4;
    const float delta = shared.stats[row].delta;
    const RowMask mask(pair, row);
#pragma unroll
    for (int j = 0; j < Wc / 4; ++j) {
      const float2 PS = shared.PS[i * (Wc / 8) + j / 2][threadIdx.x];
      float& x = dP[i / 2][j / 2][i % 2 * 2 + j % 2];
      x = weighted_gradient(j % 2 ? PS.y : PS.x, x, delta, pair.extent.kept_factor());
      const int col = own.col + j / 2 * 8 + 2 * (lane % 4) + j % 2;
      if ((masked && !mask.reaches(col)) || hides_pair<masked>(pair, row, col)) x = 0;
    }
  }
}

// Writes the warp's part of P or dS to the tile at `to`; skips rows past the end.
__device__ __forceinline__ void write_tile(operand* to, int stride, const Sums& part,
                                           const Own& own, int rows, int cols, int lane) {
  const timeline::Phase phase(timeline::epilogue);
#pragma unroll
  for (int i = 0; i < rows_of_thread; ++i) {
    const int row = opaque(own.row) + i * 8 + lane / 4;
    unsigned pairs[Wc / 8];
#pragma unroll
    for (int n = 0; n < Wc / 8; ++n)
      pairs[n] = pack<operand>(part[i / 2][n][i % 2 * 2], part[i / 2][n][i % 2 * 2 + 1]);
    store_row<Bc>(to + (long long)row * stride, pairs, own.col, true, row < rows, lane, cols);
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_slices_backward_scores(
    Tensor<const operand> Q, Tensor<const operand> K, Tensor<const operand> V,
    Tensor<const operand> dO, Tensor<const real> lse, Tensor<const real> delta, operand* P,
    operand* dS, Sizes sizes, int heads, int group, int first_head, int first_key, int stride,
    real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const int row_tiles = cdiv(sizes.M, Br), key_tiles = cdiv(min(sizes.N - first_key, stride), Bc);
  const int tiles = max(row_tiles * key_tiles, 1);
  const int local_head = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const int head = (first_head + local_head) % heads, batch = (first_head + local_head) / heads;
  const Extent extent = extent_of(sizes, mods, batch, head);
  const Scorer<float> scorer = {scale, mods};
  const int M = extent.M, N = extent.N;
  const int first_row = tile % row_tiles * Br, col = tile / row_tiles * Bc;
  const int key = first_key + col, last_row = min(first_row + Br, M) - 1;
  if (key >= N || extent.kv_end(last_row) <= key || extent.kv_begin(first_row) >= key + Bc)
    return;  // the whole block returns: no row of its tile sees any of its keys

  const TilePair<Br, Bc> pair = {extent, first_row, key};
  timeline::event(timeline::tile, key, first_row);
  RowLoads<threads, Br> loads;
  loads.load({lse, delta, batch}, head, first_row, M);
  Ring<Source, Stage, stages> ring = {
      shared.ring, {Q, K, V, dO, M, N, batch, head, head / group, first_row, key}};
  ring.start();
  loads.store(shared.stats);
  __syncthreads();
  const bool whole = key + Bc <= N && pair.reaches_all();
  const long long place = ((long long)local_head * M + first_row) * stride + col;

  Sums S = {}, dP = {};
  multiply_slices(ring, slices, S);
  {
    const Own own(Wc);
    const int lane = own_lane();
    const auto lse_of = [&](int row) { return *lse.row(batch, head, first_row + row); };
    bool is_huge = false;
#pragma unroll
    for (int i = lane; i < Wr; i += warp_size) is_huge |= isnan(shared.stats[own.row + i].lse2);
    if (__any_sync(full_warp, is_huge))
      compute_P<true, true>(S, shared, own, pair, scorer, lane, lse_of);
    else if (whole)
      compute_P<false, false>(S, shared, own, pair, scorer, lane, lse_of);
    else
      compute_P<true, false>(S, shared, own, pair, scorer, lane, lse_of);
    write_tile(P + place, stride, S, own, M - first_row, stride - col, lane);
  }
  multiply_slices(ring, cdiv(dv, Bd), dP);
  const Own own(Wc);
  const int lane = own_lane();
  if (whole)
    compute_dS<false>(dP, shared, own, pair, lane);
  else
    compute_dS<true>(dP, shared, own, pair, lane);
  write_tile(dS + place, stride, dP, own, M - first_row, stride - col, lane);
}
