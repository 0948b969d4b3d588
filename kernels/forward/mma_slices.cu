// mma_slices: `mma_pipelined` for arbitrary head dimensions, which are processed in slices.
//
// A tile of S is accumulated over slices of d, a tile of O over slices of keys. All slices pass
// through one ring of stages, so shared memory does not depend on d or dv. P of `span` keys stays
// in shared memory between the two products. If there are more keys, O is kept in global memory
// while P of the next span is computed.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   O_sum: scratch for each block's tiles of O in float, if N > span
//   grid (cdiv(M, Br) * heads * batch)
//   block (32 * Br * Bc / (Wr * Wc)): each warp owns Wr x Wc of S
//   the host sets: scalar, result, operand, real, Br, Bc, Wr, Wc, Bd, span, stages, pack_gqa, d,
//   dv, threads, shared_bytes and options (extent.cuh)
#include <attention/nonfinite.cuh>
#include <attention/row_state.cuh>
#include <attention/row_tile.cuh>
#include <attention/score.cuh>
#include <attention/tile_mask.cuh>
#include <forward/parts/multiply_fragments.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/mma.cuh>
#include <ptx/opaque.cuh>
#include <tile/async_copy.cuh>
#include <tile/shared.cuh>
#include <tile/store.cuh>
#include <tile/tensor.cuh>
#include <tile/warp.cuh>
#include <timeline.cuh>

constexpr int col_warps = Bc / Wc;  // warps that share the same rows
using OwnRows = Rows<Wr>;
constexpr int slices = cdiv(d, Bd);  // slices of Q and K along d
// A warp owns a Wr x Wv block of O. O is split into cdiv(dv, Bc) tiles of equal width.
constexpr int Wv = cdiv(dv, cdiv(dv, Bc) * col_warps * step) * step;
constexpr int Bo = Wv * col_warps;

// Returns the number of keys in a slice of V: as many as fit into a stage, but at most `most`.
__host__ __device__ constexpr int keys_in_slice(int most) {
  return most > step && (most * Bo > (Br + Bc) * Bd || Bc % most != 0) ? keys_in_slice(most / 2)
                                                                       : most;
}
constexpr int Bv = keys_in_slice(64);
constexpr int fragments = Wr / step * (Wv / 8);  // fragments of O per thread, 4 floats each

union Slice {
  struct {
    operand Q[Br][Bd];
    operand K[Bc][Bd];
  } scores;
  operand V[Bv][Bo];
};

struct Shared {
  operand P[Br][span];
  Slice ring[stages];
  float factors[span / Bc][Br];  // rescale factors of O, per tile of keys
  float shares[col_warps][Br];   // each warp's part of a row's maximum or sum
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(sizeof(operand) == 2, "these tensor-core products take 16-bit numbers");
static_assert(threads == warp_size * (Br / Wr) * col_warps, "the warps' tiles must cover S");
static_assert(Wr % step == 0 && Wc % step == 0 && Bd % step == 0, "tiles are multiples of 16 x 16");
static_assert(span % Bc == 0, "a span is made of whole tiles of keys");
static_assert(stages >= 2, "one slice is multiplied while the next one is loaded");

// The sequence of slices that a block multiplies. Each span of keys begins with the slices of Q and
// K for every tile of S, followed by the slices of V for every tile of O.
struct Stream {
  Head Q, K, V;  // K and V end at the last visible key
  int first_row;
  bool late;
  int first_key, tile = 0, slice = 0, stage = 0;

  // Starts copying the next slice, if any, into a stage.
  __device__ __forceinline__ void begin(Slice& to) {
    const int keys = min(span, K.rows - first_key), score_tiles = cdiv(keys, Bc);
    if (keys > 0) {
      int end = slices;
      if (tile < score_tiles) {
        const int key = first_key + tile * Bc, col = slice * Bd;
        copy_tile<threads, Bd, d % Bd == 0>(to.scores.Q, Q, first_row, col, d - col);
        copy_tile<threads, Bd, d % Bd == 0>(to.scores.K, K, key, col, d - col);
      } else {
        const int key = first_key + slice * Bv, col = (tile - score_tiles) * Bo;
        copy_tile<threads, Bo, dv % Bo == 0>(to.V, V, key, col, dv - col);
        end = cdiv(keys, Bv);
      }
      if (++slice == end) {
        slice = 0;
        if (++tile == score_tiles + cdiv(dv, Bo)) {
          tile = 0;
          first_key += span;
        }
      }
    }
    cp_async_commit_group();
  }

  // Returns the next slice. `late` warps issue their copies after their products, in `done`; all
  // other warps issue them before, so that warps of one scheduler overlap copies with products.
  __device__ __forceinline__ Slice& next(Shared& shared) {
    cp_async_wait_group<stages - 2>();
    __syncthreads();  // the slice has arrived, and the previous one is no longer read
    if (!late) begin(shared.ring[stage == 0 ? stages - 1 : stage - 1]);
    return shared.ring[stage];
  }
  __device__ __forceinline__ void done(Shared& shared) {
    if (late) begin(shared.ring[stage == 0 ? stages - 1 : stage - 1]);
    stage = stage == stages - 1 ? 0 : stage + 1;
  }
};

// A warp's part of a tile: its first row, and its index among the warps that share its rows.
struct Part {
  int row, col_warp, lane;
  bool used;  // whether any row of the part exists

  __device__ __forceinline__ int tile_row(int i, int half) const {
    return row + i * step + half * 8 + lane / 4;
  }
  // Returns an opaque copy, so that the compiler does not hoist address arithmetic out of loops.
  __device__ __forceinline__ Part again() const {
    return {opaque(row), opaque(col_warp), opaque(lane), used};
  }
};

// S += Q K^T over a slice of d.
__device__ __forceinline__ void multiply_scores(Slice& slice, Fragments<Wr, Wc>& S,
                                                const Part& own) {
  const timeline::Phase phase(timeline::products);
  const int first_key = own.col_warp * Wc, lane = own.lane;
#pragma unroll
  for (int k = 0; k < Bd / step; ++k) {
    unsigned a[Wr / step][4];
#pragma unroll
    for (int i = 0; i < Wr / step; ++i)
      ldmatrix(a[i], at(slice.scores.Q, own.row + i * step + lane % 16, 2 * k + lane / 16));
    multiply_fragments<operand>(S, a, [&](unsigned (&b)[4], int n) {
      const int key = first_key + n * step + lane / 16 * 8 + lane % 8;
      ldmatrix(b, at(slice.scores.K, key, 2 * k + lane / 8 % 2));
    });
  }
}

// O += P V over a slice of keys, the first of which is column `key` of P.
__device__ __forceinline__ void multiply_output(Shared& shared, Slice& slice, Fragments<Wr, Wv>& O,
                                                int key, const Part& own) {
  const timeline::Phase phase(timeline::products);
  const int first_chunk = own.col_warp * Wv / in_chunk, lane = own.lane;
#pragma unroll
  for (int k = 0; k < Bv / step; ++k) {
    unsigned a[Wr / step][4];
#pragma unroll
    for (int i = 0; i < Wr / step; ++i) {
      const int chunk = (key + k * step) / in_chunk + lane / 16;
      ldmatrix(a[i], at(shared.P, own.row + i * step + lane % 16, chunk));
    }
    multiply_fragments<operand>(O, a, [&](unsigned (&b)[4], int n) {
      ldmatrix_trans(b, at(slice.V, k * step + lane % 16, first_chunk + 2 * n + lane / 16));
    });
  }
}

// Turns S into P = 2^(S * scale2 - maximum) and writes it, in 16 bits, to shared.P from column
// `key` on. Rescales the row sums to the new maximum; `factors` rescale O later.
template <bool masked>
__device__ __forceinline__ void softmax(Shared& shared, Fragments<Wr, Wc>& S, OwnRows& rows,
                                        int first_key, int key, const Part& part) {
  const timeline::Phase phase(timeline::softmax, Wr * Wc / 32);
  const Part own = part.again();
  const int own_key = key + own.col_warp * Wc;
#pragma unroll
  for (int r = 0; r < 2 * (Wr / step); ++r) {
    const int i = r / 2, half = r % 2;
    float largest = -infinity;
#pragma unroll
    for (int n = 0; n < Wc / 4; ++n) {
      float& score = S[i][n / 2][2 * half + n % 2];
      const int column = first_key + own_key + n / 2 * 8 + 2 * (own.lane % 4) + n % 2;
      if (masked && !rows.in_reach(i, half, column)) score = -infinity;
      largest = fmax(largest, score);
    }
    largest = fmax(largest, __shfl_xor_sync(full_warp, largest, 1));
    largest = fmax(largest, __shfl_xor_sync(full_warp, largest, 2));
    if (own.lane % 4 == 0) shared.shares[own.col_warp][own.tile_row(i, half)] = largest;
  }
  __syncthreads();  // each warp's largest scores are written
#pragma unroll
  for (int i = 0; i < Wr / step; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = own.tile_row(i, half);
      float largest = -infinity;
#pragma unroll
      for (int w = 0; w < col_warps; ++w) largest = fmax(largest, shared.shares[w][row]);
      rows.raise_row_max_to(2 * i + half, largest, rows.scale2);
      const float before = rows.maximum[i][half], now = fmax(before, rows.exponent_of(largest));
      const float factor = exp2f(before - now);
      rows.maximum[i][half] = now;
      if (own.col_warp == 0 && own.lane % 4 == 0) shared.factors[key / Bc][row] = factor;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < Wc / 8; ++n) {
        const float p0 = exp2f(S[i][n][2 * half] * rows.scale2 - now);
        const float p1 = exp2f(S[i][n][2 * half + 1] * rows.scale2 - now);
        sum += p0;
        sum += p1;
        operand* to = at(shared.P, row, own_key / in_chunk + n) + 2 * (own.lane % 4);
        *reinterpret_cast<unsigned*>(to) = pack<operand>(p0, p1);
      }
      rows.sum[i][half] = rows.sum[i][half] * factor + sum;
    }
  }
  for_dropped(S, 0, Wc / step, rows, first_key + own_key, [&](int i, int j, int e) {
    operand* chunk = at(shared.P, own.tile_row(i, e / 2), own_key / in_chunk + j);
    chunk[2 * (own.lane % 4) + e % 2] = operand(0.0f);
  });
}

// Adds the warps' partial row sums; every thread gets the total.
__device__ __forceinline__ void add_up_sums(Shared& shared, OwnRows& rows, const Part& own) {
  __syncthreads();  // before the sums overwrite the maxima
#pragma unroll
  for (int i = 0; i < 2 * (Wr / step); ++i) {
    float sum = rows.sum[i / 2][i % 2];
    sum += __shfl_xor_sync(full_warp, sum, 1);
    sum += __shfl_xor_sync(full_warp, sum, 2);
    if (own.lane % 4 == 0) shared.shares[own.col_warp][own.tile_row(i / 2, i % 2)] = sum;
  }
  __syncthreads();  // each warp's sums are written
#pragma unroll
  for (int i = 0; i < 2 * (Wr / step); ++i) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < col_warps; ++w) sum += shared.shares[w][own.tile_row(i / 2, i % 2)];
    rows.sum[i / 2][i % 2] = sum;
  }
}

// Rescales O to the row maxima after a tile of keys.
__device__ __forceinline__ void rescale(Fragments<Wr, Wv>& O, const float (&factors)[Br],
                                        const Part& own) {
#pragma unroll
  for (int i = 0; i < 2 * (Wr / step); ++i) {
    const float factor = factors[own.tile_row(i / 2, i % 2)];
#pragma unroll
    for (int j = 0; j < Wv / 4; ++j) O[i / 2][j / 2][i % 2 * 2 + j % 2] *= factor;
  }
}

// Stores the warp's part of a tile of O in register order; load_sums() reads it back.
__device__ __forceinline__ void save_sums(const Fragments<Wr, Wv>& O, float4* to) {
#pragma unroll
  for (int i = 0; i < fragments; ++i) {
    const float (&x)[4] = O[i / (Wv / 8)][i % (Wv / 8)];
    to[i * threads] = {x[0], x[1], x[2], x[3]};
  }
}

__device__ __forceinline__ void load_sums(Fragments<Wr, Wv>& O, const float4* from) {
#pragma unroll
  for (int i = 0; i < fragments; ++i) {
    const float4 x = from[i * threads];
    float (&sums)[4] = O[i / (Wv / 8)][i % (Wv / 8)];
    sums[0] = x.x, sums[1] = x.y, sums[2] = x.z, sums[3] = x.w;
  }
}

// Stores the warp's part of a tile of O / sum; `to` points to the thread's first row.
__device__ __forceinline__ void store_output(const Fragments<Wr, Wv>& O, const OwnRows& rows,
                                             result* to, long long stride, bool aligned,
                                             int first_col, int M, const Part& own) {
  const timeline::Phase phase(timeline::epilogue);
  stride = opaque(stride);
  const int first_row = opaque(rows.first);
  first_col += own.col_warp * Wv;
#pragma unroll
  for (int i = 0; i < 2 * (Wr / step); ++i) {
    const float sum = rows.sum[i / 2][i % 2],
                inverse = sum == 0 ? 0.0f : rows.extent.kept_factor() / sum;
    const bool inside = first_row + i * 8 < M;
    if constexpr (sizeof(result) == sizeof(operand)) {
      unsigned pairs[Wv / 8];
#pragma unroll
      for (int n = 0; n < Wv / 8; ++n) {
        const float (&x)[4] = O[i / 2][n];
        pairs[n] = pack<operand>(x[i % 2 * 2] * inverse, x[i % 2 * 2 + 1] * inverse);
      }
      store_row<dv>(to, pairs, first_col, aligned, inside, own.lane);
    } else {
#pragma unroll
      for (int j = 0; j < Wv / 4; ++j) {
        const int col = first_col + j / 2 * 8 + 2 * (own.lane % 4) + j % 2;
        if (inside && col < dv) to[col] = O[i / 2][j / 2][i % 2 * 2 + j % 2] * inverse;
      }
    }
    to += 8 * stride;
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_slices(
    Tensor<const operand> Q, Tensor<const operand> K, Tensor<const operand> V, Tensor<result> O,
    Tensor<real> lse, real* O_sum, Sizes sizes, int heads, int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const int M = sizes.M, tiles = cdiv(M, Br);
  const Place block = place(blockIdx.x, tiles, heads);
  const int head = block.head, batch = block.batch;
  const int first_row = (tiles - 1 - block.tile) * Br;  // longest tile first
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  const int own_row = warp % (Br / Wr) * Wr;
  const Part own = {own_row, warp / (Br / Wr), lane, first_row + own_row < M};
  const bool out_aligned = is_aligned(O);
  const Extent extent = extent_of(sizes, mods, batch, head);
  const Scorer<real> scorer = {scale, mods};
  const RowTile tile = row_tile<Br, Bc>(extent, first_row, head, batch);
  const int start = tile.kv_begin;

  Stream stream = {Head(Q, batch, head, M),
                   Head(K, batch, head / group, tile.kv_end),
                   Head(V, batch, head / group, tile.kv_end),
                   first_row,
                   warp / 4 % 2 == 1,
                   start};
#pragma unroll 1
  for (int i = 0; i < stages - 1; ++i) stream.begin(shared.ring[i]);

  OwnRows rows(first_row + own.row + lane / 4, extent, scorer.scale2());
  if (has_sink && own.col_warp > 0) {  // warps' sums are added up: one includes the sink
    for (auto& sums : rows.sum) sums[0] = sums[1] = 0;
  }
  bool wrong = false;

#pragma unroll 1
  for (int first_key = start; first_key == start || first_key < tile.kv_end; first_key += span) {
    const int keys = min(span, tile.kv_end - first_key);
#pragma unroll 1
    for (int key = 0; key < keys; key += Bc) {
      timeline::event(timeline::tile, first_key + key, first_row);
      Fragments<Wr, Wc> S = {};
#pragma unroll 1
      for (int slice = 0; slice < slices; ++slice) {
        Slice& current = stream.next(shared);
        if (own.used && key + own.col_warp * Wc < keys) multiply_scores(current, S, own);
        stream.done(shared);
      }
      scorer.apply(S, rows, first_key + key + own.col_warp * Wc);
      if (is_masked(extent, first_row, Br, first_key + key, Bc))
        softmax<true>(shared, S, rows, first_key, key, own);
      else
        softmax<false>(shared, S, rows, first_key, key, own);
    }

    const bool last = first_key + span >= tile.kv_end;
    if (last) add_up_sums(shared, rows, own);
    result* out = O.row(batch, head, rows.first);
    float4* saved = reinterpret_cast<float4*>(O_sum) +
                    static_cast<long long>(blockIdx.x) * (cdiv(dv, Bo) * fragments * threads) +
                    threadIdx.x;
#pragma unroll 1
    for (int col = 0; col < dv; col += Bo, saved += fragments * threads) {
      Fragments<Wr, Wv> sums = {};
      if (first_key > start) load_sums(sums, saved);
#pragma unroll 1
      for (int key = 0; key < keys; key += Bv) {
        Slice& current = stream.next(shared);
        if (key % Bc == 0 && first_key + key > start) rescale(sums, shared.factors[key / Bc], own);
        if (own.used) multiply_output(shared, current, sums, key, own);
        stream.done(shared);
      }
      if (last) {
        wrong |= has_mask && has_nan(sums);
        store_output(sums, rows, out, O.row_stride, out_aligned, col, M, own);
      } else {
        save_sums(sums, saved);
      }
    }
  }
  // Recomputes the block's position, so that it occupies no registers during the loops.
  const Place same = place(opaque(int(blockIdx.x)), tiles, heads);
  if (own.col_warp == 0 && lane % 4 == 0) {
    for (int i = 0; i < 2 * (Wr / step); ++i) {
      const int row = opaque(rows.first) + i * 8;
      if (row < M) {
        *lse.row(same.batch, same.head, row) =
            rows.maximum[i / 2][i % 2] * ln2 + log(rows.sum[i / 2][i % 2]);
        write_row_max(extent, row, rows.row_max(i), rows.sum[i / 2][i % 2]);
      }
    }
  }
  // All warps must have stored their part of a row before one of them repairs it.
  if (!__syncthreads_or(wrong || overflows(rows))) return;
  for (int row = first_row + warp; row < min(first_row + Br, M); row += threads / warp_size)
    repair_row<d, dv>(Q, K, V, O, lse, extent, row, same.batch, same.head, same.head / group,
                      scorer);
}
